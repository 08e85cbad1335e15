"""Calls of the experts alone, layer after layer: goldsmith's engine by several rules, and transformers' experts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from goldsmith.cli.bench.timing import Timing
from goldsmith.offload.calibration.calibration import Calibration
from goldsmith.offload.engine import Engine
from goldsmith.offload.memory.budget import _ROWS, SPARE, STAGING
from goldsmith.offload.observe.statistics import Counts
from goldsmith.offload.planning.costs import Costs

from . import hardware, rules
from .clock import take_turns
from .rows import OffloadRow
from .shapes import Layers, Turn, turns, waits
from .verification import golden, verify

OURS = "goldsmith"
OP = "offload.calls"
TURNS = {1: 48}  # passes with different inputs, by number of tokens; FEW for more tokens, which use every expert
FEW = 3
WARM = 8
COMPARED = 2  # tokens that are compared with the golden


@dataclass
class LayerVariant:
    """A way to compute a layer's experts; `rule` assigns experts to the engine's lanes (None: its own plan)."""

    name: str
    call: Callable[[int, int], Any]  # (turn, layer) -> y
    rule: rules.Rule | None = None
    note: str = ""


def engine_for(layers: Layers, share: float, calibration: Calibration | None, threads: int | None) -> Engine:
    """An engine whose cache keeps the first `share` of each layer's experts, with room to stream whole layers."""
    shape, store = layers.shape, layers.store
    most, resident = shape.E, round(share * shape.E)
    slots = STAGING + 4 * most + 2 * resident * layers.count
    row = 4 * (shape.H + shape.I) + 24
    rest: dict[str, Any] = {"cache": "none"}
    if resident:
        counts = {str(n): [1] * resident + [0] * (most - resident) for n in layers.numbers}
        rest = {"cache": "static", "profile": {"counts": counts}}
    budget = slots * store.expert_nbytes(layers.numbers[0]) + _ROWS[0] * row + SPARE
    engine = Engine(
        store, device=layers.device, gpu_budget=budget, exact=False, calibration=calibration, threads=threads, **rest
    )
    if resident:
        _fill(engine, layers, resident)
    return engine


def _fill(engine: Engine, layers: Layers, resident: int) -> None:
    """Make calls that copy into the cache the experts that must stay there."""
    k = layers.shape.k
    ids = torch.arange(-(-resident // k) * k).remainder(resident).view(-1, k).to(layers.device)
    x = torch.zeros(len(ids), layers.shape.H, dtype=torch.bfloat16, device=layers.device)
    with ruled(engine, rules.all_copied):
        for layer in layers.numbers:
            engine(layer, x, ids, torch.ones(ids.shape, device=layers.device))
    engine.flush()
    for layer in layers.numbers:
        there = len(engine._caches[layer].resident())
        if there != resident:
            raise RuntimeError(
                f"benchmarks.offload: {there} experts of layer {layer} are in the cache, wanted {resident}"
            )


@contextmanager
def ruled(engine: Engine, rule: rules.Rule | None) -> Iterator[None]:
    """Let this rule assign experts to lanes; None: the engine's own plan."""
    before = engine._assign
    engine._assign = rule or before
    try:
        yield
    finally:
        engine._assign = before


def rows(
    layers: Layers, tokens: int, share: float, *, seconds: float, calibration: Calibration | None,
    threads: int | None, peers: bool,
) -> Iterator[OffloadRow]:  # fmt: skip
    """Timings of one case; one row without a time where the engine's result is wrong."""
    engine = engine_for(layers, share, calibration, threads)
    try:
        layers.say("checking")
        verdict = verify(engine, layers, tokens)
        inputs = turns(layers, tokens, TURNS.get(tokens, FEW))
        base = OffloadRow(
            OP, layers.shape.name, f"{'decode' if tokens == 1 else 'prefill'} T={tokens}, {share:.0%} cached",
            {"H": layers.shape.H, "I": layers.shape.I, "E": layers.shape.E, "k": layers.shape.k,
             "layers": layers.count, "T": tokens}, "bfloat16", layers.store.format, OURS, threads=engine.threads,
        )  # fmt: skip
        if not verdict[0]:
            yield replace(base, verified=False, verified_by=verdict[1])
            return
        variants = _variants(engine, layers, inputs, peers, share)
        yield from _timed(engine, layers, inputs, variants, base, verdict[1], seconds)
    finally:
        engine.close()


def _variants(engine: Engine, layers: Layers, inputs: list[Turn], peers: bool, share: float) -> list[LayerVariant]:
    def ours(turn: int, layer: int) -> Tensor:
        return engine(layer, *inputs[turn][layer])

    fiddler = _fiddler(engine, layers, inputs)
    variants = [
        LayerVariant(OURS, ours, note="the calibrated plan"),
        LayerVariant("all on the CPU", ours, rules.all_on_cpu, "our engine; cached experts stay on the device"),
        LayerVariant("all copied", ours, rules.all_copied, "our engine"),
        LayerVariant("fixed ratio", ours, rules.fixed_ratio, "our engine: half of the misses on the CPU, overlapped"),
        LayerVariant(
            "Fiddler's rule", fiddler, note="our engine: each expert where it alone is quicker; the CPU's part first"
        ),
    ]
    if not peers:
        return variants
    cpu = layers.weights
    for name, implementation in (("transformers, CPU", "eager"), ("grouped_mm, CPU", "grouped_mm")):
        variants.append(
            LayerVariant(name, _transformers(layers, inputs, cpu, implementation), note="x to the CPU and y back")
        )
    if layers.device.type == "cuda":
        implementation = "batched_mm" if len(inputs[0][layers.numbers[0]][0]) == 1 else "grouped_mm"
        call = _transformers(layers, inputs, layers.on_device, implementation)
        variants.append(LayerVariant("all on the GPU", call, note=f"transformers, {implementation}"))
    return variants


def _fiddler(engine: Engine, layers: Layers, inputs: list[Turn]) -> Callable[[int, int], Tensor]:
    costs: Costs = engine.calibration.costs
    halves: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for i, turn in enumerate(inputs):
        for layer, (x, ids, weights) in turn.items():
            counts = torch.bincount(ids.view(-1).cpu(), minlength=layers.shape.E).tolist()
            chosen = rules.fiddlers_cpu(counts, engine._caches[layer].resident(), costs)
            halves[i, layer] = (x, *rules.parts(ids, chosen, layers.shape.E), weights)

    def call(turn: int, layer: int) -> Tensor:
        x, on_cpu, others, weights = halves[turn, layer]
        with ruled(engine, rules.all_on_cpu):
            some = engine(layer, x, on_cpu, weights)
        with ruled(engine, rules.all_copied):
            return some + engine(layer, x, others, weights)

    return call


def _transformers(
    layers: Layers, inputs: list[Turn], weights: dict[int, tuple[Tensor, Tensor]], implementation: str
) -> Callable[[int, int], Tensor]:
    model = layers.model(weights, implementation)
    experts = {n: model.layers[n].mlp.experts for n in layers.numbers}
    where = weights[layers.numbers[0]][0].device

    def call(turn: int, layer: int) -> Tensor:
        x, ids, w = inputs[turn][layer]
        return experts[layer](x.to(where), ids.to(where), w.to(where, x.dtype)).to(x.device)

    return call


def _timed(
    engine: Engine,
    layers: Layers,
    inputs: list[Turn],
    variants: list[LayerVariant],
    base: OffloadRow,
    verified_by: str,
    seconds: float,
) -> Iterator[OffloadRow]:
    wait, counts = waits(layers.device), len(layers.numbers)
    at = dict.fromkeys((v.name for v in variants), 0)

    def passes(variant: LayerVariant) -> None:
        turn = at[variant.name] = (at[variant.name] + 1) % len(inputs)
        with ruled(engine, variant.rule):
            for layer in layers.numbers:
                variant.call(turn, layer)
        wait()

    with torch.no_grad():
        layers.say("first calls")
        errors = _errors(engine, layers, inputs[0], variants)
        calls = {v.name: partial(passes, v) for v in variants}
        for call in calls.values():
            for _ in range(WARM if len(inputs) > FEW else 1):
                call()
        layers.say("timing")
        lanes = {v.name: Counts() for v in variants if v.name == OURS or v.rule is not None}
        timings = take_turns(calls, seconds, lambda name: _counted(engine, lanes.get(name)))
        layers.say("the hardware")
        link = engine.calibration.costs.link_bytes_per_s
        hard = hardware.rates(engine, link)
        floor = 1e6 * _hardware(engine, layers, inputs, hard)
        for v in variants:
            row = _filled(base, timings[v.name], counts, v)
            row = replace(row, error=errors[v.name], hardware_us=floor, hardware_share=floor / (row.median_us or 1.0))
            if v.name == OURS:
                row = replace(row, verified=True, verified_by=verified_by)
            if v.name in lanes:
                row = _with_lanes(row, lanes[v.name])
            if v.name == OURS:
                row = replace(row, figures=_constants(engine.calibration.costs, hard))
            yield row


def _filled(base: OffloadRow, timing: Timing, counts: int, variant: LayerVariant) -> OffloadRow:
    median, p10, p90 = (t / counts for t in (timing.median, timing.p10, timing.p90))
    return replace(base, peer=variant.name, median_us=median, p10=p10, p90=p90, runs=timing.runs, note=variant.note)


@contextmanager
def _counted(engine: Engine, into: Counts | None) -> Iterator[None]:
    """Add what the lanes do inside to `into`; t_wall is the whole time, with the device's last work."""
    engine.reset_stats()
    began = time.perf_counter()
    yield
    whole = time.perf_counter() - began
    if into is not None:
        counts = engine.stats()
        counts.t_wall = whole
        into.add(counts)


def _with_lanes(row: OffloadRow, counts: Counts) -> OffloadRow:
    """The row with the work of each lane in the timed calls; lane times are shares of their whole time."""
    n, whole = counts.calls, counts.t_wall
    cpu, link, busy = (t / whole for t in (counts.t_cpu, counts.t_link, counts.t_device))
    bound = 1e6 * counts.bound / n if counts.bound else None
    return replace(
        row, hit_rate=counts.hit_rate, on_cpu=counts.experts_cpu / n, copied=counts.experts_copied / n,
        cached=counts.experts_cached / n, bound_us=bound, bound_share=bound and bound / (row.median_us or 1.0),
        limiting=counts.limiting, overlap=max(cpu, link, busy), cpu=cpu, link=link, device_busy=busy,
    )  # fmt: skip


def _errors(engine: Engine, layers: Layers, turn: Turn, variants: list[LayerVariant]) -> dict[str, float]:
    """|y - golden| / |golden| of the first tokens of the last layer."""
    layer = layers.numbers[-1]
    x, ids, weights = (t[:COMPARED] for t in turn[layer])
    wanted, errors = golden(layers, layer, ids)(x.double(), weights.double()), dict[str, float]()
    for variant in variants:
        with ruled(engine, variant.rule):
            y = variant.call(0, layer)[:COMPARED]
        errors[variant.name] = float((y.double() - wanted).norm() / wanted.norm())
    return errors


def _hardware(engine: Engine, layers: Layers, inputs: list[Turn], costs: Costs) -> float:
    """Average seconds of a call at the rates that the hardware reaches."""
    times = []
    for turn in inputs:
        for layer, (_, ids, _) in turn.items():
            counts = torch.bincount(ids.view(-1).cpu(), minlength=layers.shape.E).tolist()
            times.append(hardware.predicted_time(counts, sorted(engine._caches[layer].resident()), costs))
    return sum(times) / len(times)


def _constants(calibrated: Costs, hard: Costs) -> dict[str, float]:
    """Rates and latencies of the calibration and of the hardware in SI units; curves in microseconds."""
    rates = ("cpu_bytes_per_s", "cpu_flops", "link_bytes_per_s", "dram_bytes_per_s", "device_bytes_per_s")
    names = (*rates, "device_flops", "cpu_latency", "link_latency", "device_latency", "split_latency")
    constants = {name: float(getattr(calibrated, name)) for name in names}
    constants["break_even_tokens"] = calibrated.break_even()
    for name, curve in (("cpu", calibrated.cpu_curve), ("beside", calibrated.cpu_beside_curve)):
        constants |= {f"{name}_us_{n:.0f}": 1e6 * seconds for n, seconds in curve}
    return constants | {f"hardware_{name}": float(getattr(hard, name)) for name in names[:6]}
