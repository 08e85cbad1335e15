"""The assignment of a call: which lane computes which expert, and which experts are uploaded into the cache.

A pure function of the tokens of each expert, the cache's contents when the call begins, and the calibrated costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress

import numpy as np

from ..memory.budget import Spending
from ..memory.cache import Cache, most_used_first
from ..settings import EngineSettings
from .costs import Costs
from .plan import Plan, on_cpu, plan, predict_stream, quickest, stream_times

PREFILL = 16  # a call of more tokens counts as the reading of a prompt
UPLOADS = 2  # most uploads into the cache per call, in addition to the plan's copies


@dataclass(frozen=True)
class Assignment:
    """The experts of a call by lane: `copied` in the order of their copies; `uploads` go into the cache for later
    calls.

    streamed   all copies go through an arena for the whole layer, and the next layer's copy begins
    predicted, limiting, times   taken from the plan; None or empty without calibrated costs
    """

    cached: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    cpu: tuple[int, ...] = ()
    uploads: tuple[int, ...] = ()
    streamed: bool = False
    predicted: float | None = None
    limiting: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)

    def lane_of(self) -> dict[int, str]:
        lanes = {"cached": self.cached, "copied": self.copied, "cpu": self.cpu}
        return {e: lane for lane, experts in lanes.items() for e in experts}


def assign(
    counts: Sequence[int], tokens: int, cache: Cache, settings: EngineSettings, spending: Spending, costs: Costs | None
) -> Assignment:
    used = list(compress(range(len(counts)), counts))
    if settings.lanes == "cpu" or not spending.device_lane:
        return Assignment(cpu=tuple(used))
    if settings.lanes == "copied":
        return Assignment(copied=tuple(most_used_first(used, counts)))
    if settings.lanes == "cached":
        return Assignment(cached=tuple(used))
    if settings.lanes == "mixed":
        lane: list[list[int]] = [[], [], []]
        for e in used:
            lane[e % 3].append(e)
        return Assignment(cached=tuple(lane[2]), copied=tuple(lane[1]), cpu=tuple(lane[0]))
    if costs is None:
        return Assignment(cpu=tuple(used))
    return _planned(counts, used, tokens, cache, settings, costs)


def _planned(
    counts: Sequence[int], used: Sequence[int], tokens: int, cache: Cache, settings: EngineSettings, costs: Costs
) -> Assignment:
    prompt = tokens > PREFILL
    if settings.prefill in ("auto", "split") and _cpu_is_all(costs):
        split = _alone(tuple(sorted([counts[e] for e in used])), costs)
        return Assignment(cpu=tuple(used), predicted=split.predicted, limiting=split.limiting, times=split.lane_times)
    if not prompt and not isinstance(settings.prefill, int):
        return _decoded(counts, used, cache, costs)
    resident = cache.resident()
    if settings.prefill == "cpu" and prompt:
        return _as_planned(on_cpu(counts, costs))
    split = quickest(counts, resident, costs)
    if isinstance(settings.prefill, int):
        streamed = tokens >= settings.prefill
    elif settings.prefill == "auto":
        streamed = prompt and predict_stream(counts, resident, costs) < split.predicted
    else:
        streamed = prompt and settings.prefill == "stream"
    if streamed:
        missing = most_used_first((e for e in used if e not in resident), counts)
        cached = tuple(e for e in used if e in resident)
        times = stream_times(counts, resident, costs)
        limiting = max(times, key=times.__getitem__)
        return Assignment(cached, tuple(missing), (), (), True, times[limiting], limiting, times)
    uploads = _uploads(split.cpu, counts, cache, split, costs)
    helps = uploads and _device_helps(tuple(sorted(counts[e] for e in used)), costs)
    return _as_planned(split, uploads if helps else ())


def _as_planned(split: Plan, uploads: tuple[int, ...] = ()) -> Assignment:
    times = split.lane_times
    return Assignment(split.cached, split.copied, split.cpu, uploads, False, split.predicted, split.limiting, times)


def _decoded(counts: Sequence[int], used: Sequence[int], cache: Cache, costs: Costs) -> Assignment:
    """The assignment of a call of few tokens; it caches plans, because few different ones occur."""
    cached = [e for e in used if e in cache]
    missing = [e for e in used if e not in cache]
    tokens: tuple[int, ...] = (1,) * len(used)
    if sum([counts[e] for e in used]) == len(used):
        split = _ones(len(cached), len(missing), costs)
    else:
        missing = most_used_first(missing, counts)
        split = _cut(tuple(sorted(counts[e] for e in cached)), tuple(counts[e] for e in missing), costs)
        tokens = tuple(sorted(counts[e] for e in used))
    copies = len(split.copied)
    cpu = tuple(sorted(missing[copies:]))
    if cached and not split.cached:
        cached, cpu = [], tuple(used)
    uploads = _uploads(cpu, counts, cache, split, costs) if cpu and _device_helps(tokens, costs) else ()
    return Assignment(
        tuple(cached), tuple(missing[:copies]), cpu, uploads, False, split.predicted, split.limiting, split.lane_times
    )


@lru_cache(maxsize=4096)
def _cut(cached: tuple[int, ...], missing: tuple[int, ...], costs: Costs) -> Plan:
    """The plan for experts with these token counts: `cached` on the device, `missing` in the order of their copies."""
    return quickest([*cached, *missing], range(len(cached)), costs)


@lru_cache(maxsize=4096)
def _ones(cached: int, missing: int, costs: Costs) -> Plan:
    """The plan where each expert has one token."""
    return quickest([1] * (cached + missing), range(cached), costs)


@lru_cache(maxsize=64)
def _cpu_is_all(costs: Costs) -> bool:
    """Whether the CPU lane is always quickest: the device is the CPU itself and runs after it."""
    if not costs.shared or costs.device_latency < costs.cpu_latency:
        return False
    bends = np.concatenate([costs.cpu[0], costs.device[0]])
    return bool((np.interp(bends, *costs.device) >= np.interp(bends, *costs.cpu)).all())


@lru_cache(maxsize=4096)
def _alone(tokens: tuple[int, ...], costs: Costs) -> Plan:
    return on_cpu(tokens, costs)


@lru_cache(maxsize=4096)
def _device_helps(tokens: tuple[int, ...], costs: Costs) -> bool:
    """Whether the call would be quicker than on the CPU alone if one, half or all of its experts were cached."""
    alone, count = _alone(tokens, costs).predicted, len(tokens)
    return any(plan(tokens, range(cached), costs).predicted < alone for cached in {1, max(1, count // 2), count})


def _uploads(cpu: Sequence[int], counts: Sequence[int], cache: Cache, split: Plan, costs: Costs) -> tuple[int, ...]:
    """Experts of the CPU lane that the link can carry during this call, the most used first."""
    slack = split.predicted - split.lane_times["link"]
    most = min(UPLOADS, int(slack * costs.link_bytes_per_s / costs.expert_bytes))
    return tuple(most_used_first((e for e in cpu if e not in cache), counts)[: max(0, most)])
