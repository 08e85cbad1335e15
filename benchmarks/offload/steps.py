"""Forwards of a model's layers: everything but the experts on the device, the experts in several ways."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from goldsmith import offload
from goldsmith.offload.calibration.calibration import Calibration
from goldsmith.offload.memory.budget import _ROWS, SPARE, STAGING

from .calls import COMPARED, FEW, OURS, TURNS, WARM
from .clock import take_turns
from .rows import OffloadRow
from .shapes import Layers, waits
from .verification import golden

OP = "offload.step"
Forward = Callable[[Tensor], Tensor]
HALF = "goldsmith, half cached"
NONE = "goldsmith, none cached"
CPU = "goldsmith, all on the CPU"


class OnCpu(nn.Module):
    """Experts on the CPU in a model on a GPU: x is copied to the CPU and y back."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = self.experts(hidden_states.cpu(), top_k_index.cpu(), top_k_weights.cpu())
        return y.to(hidden_states.device)


def budget_for(layers: Layers, slots: int) -> int:
    """Bytes for this many cache slots per layer, and the workspace."""
    row = 4 * (layers.shape.H + layers.shape.I) + 24
    work = _ROWS[0] * row + SPARE if layers.device.type == "cuda" else 0
    return (STAGING + slots * layers.count) * layers.store.expert_nbytes(layers.numbers[0]) + work


def rows(
    layers: Layers, tokens: int, *, seconds: float, calibration: Calibration | None, threads: int | None, peers: bool
) -> Iterator[OffloadRow]:
    """A forward of `tokens` tokens without a key-value cache, timed in every way."""
    shape = layers.shape
    base = OffloadRow(
        OP, shape.name, f"{'decode' if tokens == 1 else 'prefill'} T={tokens}",
        {"H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k, "layers": layers.count, "T": tokens},
        "bfloat16", layers.store.format, OURS,
    )  # fmt: skip
    with ExitStack() as stack, torch.no_grad():
        ours = _ours(layers, calibration, threads, stack)
        forwards: dict[str, Forward] = {name: partial(_forward, each.model) for name, each in ours.items()}
        layers.say("checking")
        verdicts = {name: _verify(layers, each, tokens) for name, each in ours.items()}
        notes = dict.fromkeys(forwards, "the calibrated plan, lru")
        notes[CPU] = "gpu_budget=0"
        for name, make in _peers(layers, tokens).items() if peers else ():
            layers.say(name)
            try:
                forwards[name], notes[name] = make()
                forwards[name](_inputs(layers, tokens, 1)[0])
            except (RuntimeError, ValueError, ImportError) as error:
                yield replace(base, peer=name, note=f"did not run: {type(error).__name__}: {str(error)[:160]}")
                forwards.pop(name, None)
        timings, medians = _timed(layers, tokens, forwards, seconds), dict[str, float]()
        for name in forwards:
            timing = timings[name]
            row = replace(base, peer=name, median_us=timing.median, p10=timing.p10, p90=timing.p90, runs=timing.runs)
            row = replace(row, note=notes[name])
            medians[name] = timing.median
            if name in ours:
                verified, by, off = verdicts[name]
                row = replace(row, verified=verified, verified_by=by, error=off, threads=ours[name].engine.threads)
                row = _with_stats(row, layers, tokens, ours[name], forwards[name])
            yield row


def _ours(
    layers: Layers, calibration: Calibration | None, threads: int | None, stack: ExitStack
) -> dict[str, offload.Offloaded]:
    store = layers.store
    options: dict[str, Any] = {"store": store, "device": layers.device, "exact": False, "threads": threads}
    ways: dict[str, dict[str, Any]] = {
        HALF: {"gpu_budget": budget_for(layers, layers.shape.E // 2), "calibration": calibration},
        NONE: {"gpu_budget": budget_for(layers, 4), "cache": "none", "calibration": calibration},
        CPU: {"gpu_budget": 0},
    }
    models = {}
    for name, way in ways.items():
        models[name] = stack.enter_context(offload.offload(layers.model(layers.weights), **options, **way))
    return models


def _peers(layers: Layers, tokens: int) -> dict[str, Callable[[], tuple[Forward, str]]]:
    """A maker per peer; it returns the forward and a note."""
    peers: dict[str, Callable[[], tuple[Forward, str]]] = {}
    for name, implementation in (("transformers, CPU", "eager"), ("grouped_mm, CPU", "grouped_mm")):
        peers[name] = partial(_on_cpu, layers, implementation)
    if importlib.util.find_spec("accelerate") is not None:
        peers["accelerate"] = partial(_accelerate, layers)
    if layers.device.type == "cuda":
        peers["all on the GPU"] = partial(_on_device, layers, "batched_mm" if tokens == 1 else "grouped_mm")
    return peers


def _on_cpu(layers: Layers, implementation: str) -> tuple[Forward, str]:
    model = layers.model(layers.weights, implementation)
    for layer in layers.numbers:
        mlp = model.layers[layer].mlp
        mlp.experts = OnCpu(mlp.experts)
    return partial(_forward, model), f"transformers, {implementation}; the rest on {layers.device.type}"


def _on_device(layers: Layers, implementation: str) -> tuple[Forward, str]:
    return partial(_forward, layers.model(layers.on_device, implementation)), f"transformers, {implementation}"


def _accelerate(layers: Layers) -> tuple[Forward, str]:
    from accelerate import cpu_offload

    model = layers.model(layers.weights, "grouped_mm")
    for layer in layers.numbers:
        cpu_offload(model.layers[layer].mlp.experts, execution_device=layers.device)
    return partial(_forward, model), "cpu_offload of the experts, as a device_map with them on the CPU"


def _forward(model: Any, x: Tensor) -> Tensor:
    return model(inputs_embeds=x, use_cache=False).last_hidden_state


def _inputs(layers: Layers, tokens: int, count: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    drawn = (torch.randn(1, tokens, layers.shape.H, generator=make) for _ in range(count))
    return [x.bfloat16().to(layers.device) for x in drawn]


def _timed(layers: Layers, tokens: int, forwards: dict[str, Forward], seconds: float) -> Any:
    inputs, wait = _inputs(layers, tokens, TURNS.get(tokens, FEW)), waits(layers.device)
    at = dict.fromkeys(forwards, 0)

    def call(name: str) -> None:
        at[name] = (at[name] + 1) % len(inputs)
        forwards[name](inputs[at[name]])
        wait()

    calls = {name: partial(call, name) for name in forwards}
    for name, each in calls.items():
        for _ in range(WARM if name in (HALF, NONE) else 1):
            each()
    layers.say("timing")
    return take_turns(calls, seconds)


def _with_stats(
    row: OffloadRow, layers: Layers, tokens: int, offloaded: offload.Offloaded, forward: Forward
) -> OffloadRow:
    inputs = _inputs(layers, tokens, TURNS.get(tokens, FEW))
    offloaded.reset_stats()
    for x in inputs:
        forward(x)
    stats = offloaded.stats()
    n = max(1, stats.calls)
    bound = 1e6 * stats.bound / len(inputs) if stats.bound else None
    return replace(
        row, hit_rate=stats.hit_rate, on_cpu=stats.experts_cpu / n, copied=stats.experts_copied / n,
        cached=stats.experts_cached / n, limiting=stats.limiting, bound_us=bound,
    )  # fmt: skip


def _verify(layers: Layers, offloaded: offload.Offloaded, tokens: int) -> tuple[bool, str, float]:
    """Whether the last layer's experts are at least as close to float64 as the plain model's, on a forward's inputs."""
    layer, seen = layers.numbers[-1], []
    experts = offloaded.model.layers[layer].mlp.experts
    hook = experts.register_forward_hook(lambda _, arguments, y: seen.append((*arguments, y)))
    try:
        _forward(offloaded.model, _inputs(layers, tokens, 1)[0])
    finally:
        hook.remove()
    x, ids, weights, y = (t[:COMPARED] for t in copy.copy(seen[0]))
    wanted = golden(layers, layer, ids)(x.double(), weights.double())
    plain = layers.model(layers.weights, "eager").layers[layer].mlp.experts
    theirs = plain(x.cpu(), ids.cpu(), weights.cpu()).to(x.device)
    ours, plains = ((result.double() - wanted).norm() / wanted.norm() for result in (y, theirs))
    return bool(ours <= plains), f"float64: {float(ours):.1e} here, {float(plains):.1e} the plain experts", float(ours)
