"""The explanation of an engine in words and numbers: budget, lanes, costs, bottlenecks, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from .calibration.calibration import Calibration
from .memory.budget import Spending
from .observe.statistics import Counts, Stats
from .planning.assignment import PREFILL
from .planning.costs import Costs, slower
from .planning.plan import quickest
from .settings import EngineSettings
from .store.expert_store import ExpertStore

PROMPT = 512  # tokens of the prompt in the explanation
_FASTER: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu_bytes_per_s", "cpu_flops"),
    "link": ("link_bytes_per_s", "link_beside_bytes_per_s"),
}
_FASTER |= {"dram": ("dram_bytes_per_s",), "device": ("device_bytes_per_s", "device_flops")}
_CURVES = {"cpu": ("cpu_curve", "cpu_beside_curve"), "device": ("device_curve",)}
_LIMITS = {"both": "the least time of a call that uses both the CPU and the device"}


class ExplainedEngine(Protocol):
    """The part of Engine that is explained."""

    @property
    def store(self) -> ExpertStore: ...
    @property
    def settings(self) -> EngineSettings: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def threads(self) -> int: ...
    @property
    def spending(self) -> Spending: ...
    @property
    def calibration(self) -> Calibration | None: ...
    @property
    def transport(self) -> tuple[str, str]: ...
    @property
    def closed(self) -> bool: ...
    def stats(self) -> Stats: ...


@dataclass(frozen=True)
class Explanation:
    """`str()` has one line per point; `to_dict()` has the same facts for programs."""

    lines: tuple[str, ...]
    facts: dict[str, object]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_dict(self) -> dict[str, object]:
        return dict(self.facts)


def explain(engine: ExplainedEngine) -> Explanation:
    store, settings, stats = engine.store, engine.settings, engine.stats()
    transport, why = engine.transport
    facts: dict[str, Any] = {
        "device": str(engine.device), "threads": engine.threads, "format": store.format, "lanes": settings.lanes,
        "cache": settings.cache, "prefill": settings.prefill, "guard": settings.guard,
        "budget": engine.spending.to_dict(), "transport": transport, "transport_why": why,
    }  # fmt: skip
    lines = [
        f"store     {store.path}: {len(store.layers)} layers in {store.format}, {_size(store.nbytes)}",
        f"CPU lane  {engine.threads} threads, experts read from the mapped store",
        *_budget(engine),
    ]
    if engine.spending.device_lane:
        lines.append(f"copies    {transport}: {why}")
    costs = getattr(engine.calibration, "costs", None)
    if costs is None:
        lines.append("costs     not measured: no decision depends on them here")
    else:
        used, hits = _typical(stats, store.num_experts(store.layers[0]))
        predictions = _costs(costs, store.num_experts(store.layers[0]), used, hits)
        facts |= predictions
        lines += _cost_lines(predictions, settings.prefill)
        facts["calibration_others"] = others = getattr(engine.calibration, "others", None)
        if getattr(engine.calibration, "busy", False) and others is not None:
            busy = f"{100 * others:.0f} % of the processors' time"
            lines.append(f"          measured on a busy machine: other programs took {busy}")
    facts["achieved"] = {"calls": stats.calls, "predicted": stats.bound, "seconds": stats.t_bound}
    facts["achieved"] |= {"bound_share": stats.bound_share, "hit_rate": stats.hit_rate, "limiting": stats.limiting}
    lines.append(_achieved(stats, engine.spending.device_lane))
    facts["closed"] = engine.closed
    if engine.closed:
        lines.append("closed    the engine was closed and computes no more; the lines above describe the time before")
    return Explanation(tuple(lines), facts)


def _budget(engine: ExplainedEngine) -> list[str]:
    spending = engine.spending
    if not spending.device_lane:
        return [f"device    off: {spending.why_off}"]
    slots = sum(spending.cache.values())
    parts = [f"{spending.staging} slots for copies", f"{slots} in the cache ({engine.settings.cache})"]
    if spending.arenas:
        parts.append(f"{spending.arenas} arenas of {_size(spending.arena)} for prompts")
    if spending.rows:
        parts.append(f"{_size(spending.rows * spending.row_bytes)} for {spending.rows} routes at a time")
    if spending.adapters:
        parts.append(f"{_size(spending.adapters)} for adapters")
    of = f"{_size(spending.total)} of {_size(spending.budget)} on {engine.device}"
    return [f"device    {of}: {', '.join(parts)}, each slot {_size(spending.slot_bytes)}"]


def _typical(stats: Counts, experts: int) -> tuple[int, float]:
    """(experts of a call of one token, share of them in the cache): as observed, or 8 and none."""
    decode = stats.calls - stats.prefill_calls
    if not decode or stats.prefill_calls:
        return min(8, experts), stats.hit_rate or 0.0
    return max(1, min(experts, round((stats.hits + stats.misses) / decode))), stats.hit_rate or 0.0


def _costs(costs: Costs, experts: int, used: int, hits: float) -> dict[str, Any]:
    each = max(1, PROMPT * used // experts)
    calls: dict[str, tuple[Sequence[int], range]] = {
        "decode": ([1] * used + [0] * (experts - used), range(round(hits * used))),
        "prefill": ([each] * experts, range(0)),
    }
    break_even = costs.break_even()
    listed = {name: [list(point) for point in value] if isinstance(value, tuple) else value
            for name, value in asdict(costs).items()}  # fmt: skip
    facts: dict[str, Any] = {"costs": listed, "stream_tokens_per_expert": break_even}
    facts["stream_tokens"] = break_even * experts / used
    for name, (counts, cached) in calls.items():
        best = quickest(counts, cached, costs)
        gains = {}
        for lane in _FASTER:
            faster = _twice(costs, lane)
            gains[lane] = best.predicted / quickest(counts, cached, faster).predicted - 1
        facts[name] = {"predicted": best.predicted, "limiting": best.limiting, "twice_as_fast": gains}
        facts[name] |= {"experts": {"cpu": len(best.cpu), "copied": len(best.copied), "cached": len(best.cached)}}
    facts["cpu_alone"] = not any(quickest(counts, cached_experts, costs).cached for counts, _ in calls.values()
                                 for cached_experts in (range(1), range(used), range(experts)))  # fmt: skip
    return facts


def _curves(costs: dict[str, Any]) -> list[str]:
    """Lines with the seconds of an expert on the CPU by its tokens, if they were measured."""
    lines = []
    for name, when in (("cpu_curve", ""), ("cpu_beside_curve", " while copies run")):
        points = costs[name]
        if points:
            few = points[:: max(1, (len(points) - 1) // 3)]
            times = ", ".join(f"{n:.0f}: {_number(seconds * 1e6)}" for n, seconds in few)
            lines.append(f"          us per expert on the CPU{when}, by its tokens: {times}")
    return lines


def _twice(costs: Costs, lane: str) -> Costs:
    """The costs of a machine with one lane twice as fast."""
    changes: dict[str, Any] = {rate: 2 * getattr(costs, rate) for rate in _FASTER[lane] if getattr(costs, rate)}
    changes |= {name: slower(getattr(costs, name), 0.5) for name in _CURVES.get(lane, ())}
    return replace(costs, **changes)


def _cost_lines(facts: dict[str, Any], prefill: str | int) -> list[str]:
    costs = facts["costs"]
    rates = ", ".join(
        f"{lane} {_number(costs[f'{lane}_bytes_per_s'] / 1e9)}" for lane in ("cpu", "link", "dram", "device")
    )
    even = f"{facts['stream_tokens_per_expert']:.0f} tokens per expert, about {facts['stream_tokens']:,.0f} in all"
    lines = [
        f"costs     GB/s: {rates}; CPU {_number(costs['cpu_flops'] / 1e12)} TFLOP/s",
        *_curves(costs),
        f"prompts   calls of more than {PREFILL} tokens, prefill={prefill!r}; link and CPU break even at {even}",
    ]
    for name in ("decode", "prefill"):
        prediction, gains = facts[name], facts[name]["twice_as_fast"]
        helps = ", ".join(f"{lane} 2x: {100 * gain:+.0f} %" for lane, gain in gains.items())
        split = ", ".join(f"{n} {lane}" for lane, n in prediction["experts"].items() if n)
        limit = _LIMITS.get(prediction["limiting"], prediction["limiting"])
        lines.append(
            f"{name:9} {_number(prediction['predicted'] * 1e3)} ms per layer ({split}), limited by {limit}; {helps}"
        )
    if facts["cpu_alone"]:
        latency = f"a call with any expert elsewhere takes at least {costs['device_latency'] * 1e3:.2g} ms"
        lines.append(f"          the CPU alone is quickest for these experts: {latency}; gpu_budget=0 does the same")
    return lines


def _achieved(stats: Counts, device: bool) -> str:
    if not stats.calls:
        return "so far    no calls"
    parts = [f"{stats.calls} calls, {_number(stats.t_wall * 1e3 / stats.calls)} ms each"]
    if stats.bound_share is not None:
        parts.append(
            f"{_number(stats.bound * 1e3 / stats.calls)} ms predicted "
            f"({100 * stats.bound_share:.0f} % of the predicted speed)"
        )
    if device and stats.hit_rate is not None:
        parts.append(
            f"hit rate {100 * stats.hit_rate:.0f} % (it depends on the router; random or tiny models have no locality)"
        )
    if stats.limiting:
        parts.append(f"mostly limited by {_LIMITS.get(stats.limiting, stats.limiting)}")
    return "so far    " + ", ".join(parts)


def _size(nbytes: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{_number(nbytes / size)} {unit}"
    return f"{nbytes:.0f} bytes"


def _number(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
