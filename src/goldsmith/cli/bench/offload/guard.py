"""What the guard costs, and what the engine takes of the device's memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ....offload.calibration.calibration import Calibration
from ....offload.store.expert_store import ExpertStore
from .calls import FEW, OURS, TURNS, engine_for
from .rows import Row
from .shapes import Layers, turns, waits

MOST, LEAST = 400, 10  # pairs


def rows(
    layers: Layers, tokens: int, share: float, *, seconds: float, calibration: Calibration | None, threads: int | None
) -> Iterator[Row]:
    """Pairs of passes through the layers of one engine, with the guard and without, the first of them in turn."""
    engine = engine_for(layers, share, calibration, threads)
    given, wait = turns(layers, tokens, TURNS.get(tokens, FEW)), waits(layers.device)
    modes = {mode: replace(engine.settings, guard=mode) for mode in ("raise", "off")}

    def once(mode: str, turn: int) -> float:
        engine.settings = modes[mode]
        began = time.perf_counter()
        for layer in layers.numbers:
            engine(layer, *given[turn][layer])
        engine.flush()
        wait()
        return time.perf_counter() - began

    pairs: list[tuple[float, float]] = []
    try:
        with torch.no_grad():
            for turn in range(min(len(given), 8)):
                once("off", turn)
            until = time.perf_counter() + 4 * seconds
            while len(pairs) < LEAST or (len(pairs) < MOST and time.perf_counter() < until):
                turn, first = len(pairs) % len(given), len(pairs) % 2
                order = ("raise", "off") if first else ("off", "raise")
                took = {mode: once(mode, turn) for mode in order}
                pairs.append((took["raise"], took["off"]))
    finally:
        engine.close()
    ratios, on = sorted(a / b for a, b in pairs), sorted(1e6 * a / len(layers.numbers) for a, _ in pairs)
    shape, tenth = layers.shape, len(pairs) // 10
    yield Row(
        "offload.guard", shape.name, f"{'decode' if tokens == 1 else 'prefill'} T={tokens}, {share:.0%} cached",
        {"H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k, "layers": layers.count, "T": tokens}, "bfloat16",
        layers.store.format, OURS, statistics.median(on), on[tenth], on[-1 - tenth], len(pairs),
        ratio=statistics.median(ratios), ratio_p10=ratios[tenth], ratio_p90=ratios[-1 - tenth], threads=engine.threads,
        note="guard='raise' over guard='off', pairs in turn; the kernels flag rows either way",
    )  # fmt: skip


def memory(layers: Layers, *, calibration: Calibration | None, threads: int | None) -> Iterator[Row]:
    """Bytes of the device beside the budget, of the host beside the experts, and the time in which a store opens."""
    shape, device = layers.shape, layers.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before, host = torch.cuda.memory_allocated(device) if on_gpu else 0, _anonymous()
    engine = engine_for(layers, 0.5, calibration, threads)
    figures = {"budget": float(engine.spending.budget), "total": float(engine.spending.total)}
    try:
        most = 0
        for tokens in (1, 512 if on_gpu else 32):
            given = turns(layers, tokens, 1)[0]  # on the device, and not the engine's
            inputs = sum(t.nbytes for each in given.values() for t in each)
            for layer in layers.numbers:
                y = engine(layer, *given[layer])
            most = max(most, inputs + y.nbytes)
        engine.flush()
        figures["host_anonymous"] = float(_anonymous() - host)
        if on_gpu:
            figures["device_peak"] = float(torch.cuda.max_memory_allocated(device) - before)
            figures["callers_tensors"] = float(most)
    finally:
        engine.close()
    figures["store"] = float(layers.store.nbytes)
    figures["open_s"] = _seconds(lambda: ExpertStore.open(layers.store.path).close())
    yield Row(
        "offload.memory", shape.name, "decode and a prompt, 50% cached",
        {"H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k, "layers": layers.count}, "bfloat16",
        layers.store.format, OURS, figures=figures, threads=engine.threads, note="bytes, and seconds",
    )  # fmt: skip


def _seconds(call: Callable[[], None]) -> float:
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _anonymous() -> int:
    """Bytes of this process that are no file's."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
