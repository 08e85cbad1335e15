"""Calls of the experts alone, layer after layer: our engine by several rules, and transformers' own experts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....offload.calibration.calibration import Calibration
from ....offload.engine import Engine
from ....offload.memory.budget import _ROWS, SPARE, STAGING
from ....offload.observe.statistics import Counts
from ....offload.planning.costs import Costs
from ..timing import Timing
from . import hardware, rules
from .clock import take_turns
from .proof import golden, proved
from .rows import Row
from .shapes import Layers, Turn, turns, waits

OURS = "goldsmith"
OP = "offload.calls"
TURNS = {1: 48}  # passes with inputs of their own, by tokens; of more tokens a few, since each uses every expert
FEW = 3
WARM = 8
COMPARED = 2  # tokens


@dataclass
class Variant:
    """A way to compute a layer's experts. `rule` is one for our engine; error: whether it computes the same."""

    name: str
    call: Callable[[int, int], Any]  # (turn, layer) -> y
    rule: rules.Rule | None = None
    note: str = ""


def engine_for(layers: Layers, share: float, calibration: Calibration | None, threads: int | None) -> Engine:
    """An engine in whose cache the first `share` of each layer's experts stay; it has room to stream whole layers."""
    shape, store = layers.shape, layers.store
    most, held = shape.E, round(share * shape.E)
    slots = STAGING + 4 * most + 2 * held * layers.count
    row = 4 * (shape.H + shape.I) + 24
    rest: dict[str, Any] = {"cache": "none"}
    if held:
        counts = {str(n): [1] * held + [0] * (most - held) for n in layers.numbers}
        rest = {"cache": "static", "profile": {"counts": counts}}
    budget = slots * store.expert_nbytes(layers.numbers[0]) + _ROWS[0] * row + SPARE
    engine = Engine(
        store, device=layers.device, gpu_budget=budget, exact=False, calibration=calibration, threads=threads, **rest
    )
    if held:
        _fill(engine, layers, held)
    return engine


def _fill(engine: Engine, layers: Layers, held: int) -> None:
    """Calls that copy what is to stay."""
    k = layers.shape.k
    ids = torch.arange(-(-held // k) * k).remainder(held).view(-1, k).to(layers.device)
    x = torch.zeros(len(ids), layers.shape.H, dtype=torch.bfloat16, device=layers.device)
    with ruled(engine, rules.all_copied):
        for layer in layers.numbers:
            engine(layer, x, ids, torch.ones(ids.shape, device=layers.device))
    engine.flush()
    for layer in layers.numbers:
        there = len(engine._caches[layer].resident())
        if there != held:
            raise RuntimeError(f"bench offload: {there} experts of layer {layer} are in the cache, wanted {held}")


@contextmanager
def ruled(engine: Engine, rule: rules.Rule | None) -> Iterator[None]:
    """Inside, this rule assigns experts to lanes; None: the engine's own."""
    before = engine._assign
    engine._assign = rule or before
    try:
        yield
    finally:
        engine._assign = before


def rows(
    layers: Layers, tokens: int, share: float, *, seconds: float, calibration: Calibration | None,
    threads: int | None, peers: bool,
) -> Iterator[Row]:  # fmt: skip
    """Timings of one case; where the engine does not hold, one row that says so and no time."""
    engine = engine_for(layers, share, calibration, threads)
    try:
        layers.say("proving")
        verdict = proved(engine, layers, tokens)
        given = turns(layers, tokens, TURNS.get(tokens, FEW))
        base = Row(
            OP, layers.shape.name, f"{'decode' if tokens == 1 else 'prefill'} T={tokens}, {share:.0%} cached",
            {"H": layers.shape.H, "I": layers.shape.I, "E": layers.shape.E, "k": layers.shape.k,
             "layers": layers.count, "T": tokens}, "bfloat16", layers.store.format, OURS, threads=engine.threads,
        )  # fmt: skip
        if not verdict[0]:
            yield replace(base, verified=False, verified_by=verdict[1])
            return
        variants = _variants(engine, layers, given, peers, share)
        yield from _timed(engine, layers, given, variants, base, verdict[1], seconds)
    finally:
        engine.close()


def _variants(engine: Engine, layers: Layers, given: list[Turn], peers: bool, share: float) -> list[Variant]:
    def ours(turn: int, layer: int) -> Tensor:
        return engine(layer, *given[turn][layer])

    fiddler = _fiddler(engine, layers, given)
    found = [
        Variant(OURS, ours, note="the calibrated plan"),
        Variant("all on the CPU", ours, rules.all_on_cpu, "our engine; what is cached stays on the device"),
        Variant("all copied", ours, rules.all_copied, "our engine"),
        Variant("fixed ratio", ours, rules.fixed_ratio, "our engine: half of the misses on the CPU, overlapped"),
        Variant("Fiddler's rule", fiddler, note="our engine: each where it alone is quicker; the CPU's part first"),
    ]
    if not peers:
        return found
    cpu = layers.weights
    for name, implementation in (("transformers, CPU", "eager"), ("grouped_mm, CPU", "grouped_mm")):
        found.append(Variant(name, _transformers(layers, given, cpu, implementation), note="x to the CPU and y back"))
    if layers.device.type == "cuda":
        implementation = "batched_mm" if len(given[0][layers.numbers[0]][0]) == 1 else "grouped_mm"
        call = _transformers(layers, given, layers.on_device, implementation)
        found.append(Variant("all on the GPU", call, note=f"transformers, {implementation}"))
    return found


def _fiddler(engine: Engine, layers: Layers, given: list[Turn]) -> Callable[[int, int], Tensor]:
    costs: Costs = engine.calibration.costs
    halves: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for i, turn in enumerate(given):
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
    layers: Layers, given: list[Turn], weights: dict[int, tuple[Tensor, Tensor]], implementation: str
) -> Callable[[int, int], Tensor]:
    model = layers.model(weights, implementation)
    experts = {n: model.layers[n].mlp.experts for n in layers.numbers}
    where = weights[layers.numbers[0]][0].device

    def call(turn: int, layer: int) -> Tensor:
        x, ids, w = given[turn][layer]
        return experts[layer](x.to(where), ids.to(where), w.to(where, x.dtype)).to(x.device)

    return call


def _timed(
    engine: Engine, layers: Layers, given: list[Turn], variants: list[Variant], base: Row, proof: str, seconds: float
) -> Iterator[Row]:
    wait, counts = waits(layers.device), len(layers.numbers)
    at = dict.fromkeys((v.name for v in variants), 0)

    def passes(variant: Variant) -> None:
        turn = at[variant.name] = (at[variant.name] + 1) % len(given)
        with ruled(engine, variant.rule):
            for layer in layers.numbers:
                variant.call(turn, layer)
        wait()

    with torch.no_grad():
        layers.say("first calls")
        errors = _errors(engine, layers, given[0], variants)
        calls = {v.name: partial(passes, v) for v in variants}
        for call in calls.values():
            for _ in range(WARM if len(given) > FEW else 1):
                call()
        layers.say("timing")
        lanes = {v.name: Counts() for v in variants if v.name == OURS or v.rule is not None}
        timings = take_turns(calls, seconds, lambda name: _counted(engine, lanes.get(name)))
        layers.say("the hardware")
        link = engine.calibration.costs.link_bytes_per_s
        hard = hardware.rates(engine, link)
        floor = 1e6 * _hardware(engine, layers, given, hard)
        for v in variants:
            row = _filled(base, timings[v.name], counts, v)
            row = replace(row, error=errors[v.name], hardware_us=floor, hardware_share=floor / (row.median_us or 1.0))
            if v.name == OURS:
                row = replace(row, verified=True, verified_by=proof)
            if v.name in lanes:
                row = _with_lanes(row, lanes[v.name])
            if v.name == OURS:
                row = replace(row, figures=_constants(engine.calibration.costs, hard))
            yield row


def _filled(base: Row, timing: Timing, counts: int, variant: Variant) -> Row:
    median, p10, p90 = (t / counts for t in (timing.median, timing.p10, timing.p90))
    return replace(base, peer=variant.name, median_us=median, p10=p10, p90=p90, runs=timing.runs, note=variant.note)


@contextmanager
def _counted(engine: Engine, into: Counts | None) -> Iterator[None]:
    """What the lanes do meanwhile is added to `into`; its t_wall is the whole, the device's last work with it."""
    engine.reset_stats()
    began = time.perf_counter()
    yield
    whole = time.perf_counter() - began
    if into is not None:
        did = engine.stats()
        did.t_wall = whole
        into.add(did)


def _with_lanes(row: Row, did: Counts) -> Row:
    """What the lanes did in the calls that were timed; their times are shares of those calls' whole."""
    n, whole = did.calls, did.t_wall
    cpu, link, busy = (t / whole for t in (did.t_cpu, did.t_link, did.t_device))
    bound = 1e6 * did.bound / n if did.bound else None
    return replace(
        row, hit_rate=did.hit_rate, on_cpu=did.experts_cpu / n, copied=did.experts_copied / n,
        cached=did.experts_cached / n, bound_us=bound, bound_share=bound and bound / (row.median_us or 1.0),
        limiting=did.limiting, overlap=max(cpu, link, busy), cpu=cpu, link=link, device_busy=busy,
    )  # fmt: skip


def _errors(engine: Engine, layers: Layers, turn: Turn, variants: list[Variant]) -> dict[str, float]:
    """|y - golden| / |golden| of the first tokens of the last layer."""
    layer = layers.numbers[-1]
    x, ids, weights = (t[:COMPARED] for t in turn[layer])
    wanted, found = golden(layers, layer, ids)(x.double(), weights.double()), dict[str, float]()
    for variant in variants:
        with ruled(engine, variant.rule):
            y = variant.call(0, layer)[:COMPARED]
        found[variant.name] = float((y.double() - wanted).norm() / wanted.norm())
    return found


def _hardware(engine: Engine, layers: Layers, given: list[Turn], costs: Costs) -> float:
    """Seconds of a call, on average, at what the hardware reaches."""
    times = []
    for turn in given:
        for layer, (_, ids, _) in turn.items():
            counts = torch.bincount(ids.view(-1).cpu(), minlength=layers.shape.E).tolist()
            times.append(hardware.bound(counts, sorted(engine._caches[layer].resident()), costs))
    return sum(times) / len(times)


def _constants(calibrated: Costs, hard: Costs) -> dict[str, float]:
    """The calibration's rates and latencies, and the hardware's, in SI units; its curves in microseconds."""
    rates = ("cpu_bytes_per_s", "cpu_flops", "link_bytes_per_s", "dram_bytes_per_s", "device_bytes_per_s")
    names = (*rates, "device_flops", "cpu_latency", "link_latency", "device_latency", "split_latency")
    found = {name: float(getattr(calibrated, name)) for name in names}
    found["break_even_tokens"] = calibrated.break_even()
    for name, curve in (("cpu", calibrated.cpu_curve), ("beside", calibrated.cpu_beside_curve)):
        found |= {f"{name}_us_{n:.0f}": 1e6 * seconds for n, seconds in curve}
    return found | {f"hardware_{name}": float(getattr(hard, name)) for name in names[:6]}
