"""The scheduler as a pure function: which of a call's experts are computed where.

S bytes of an expert, f operations a token, n_e tokens; g(n) = max(S / device_bytes_per_s, f n / device_flops)

    T_cpu  = cpu_latency    + sum over cpu of max(S / cpu_bytes_per_s, f n_e / cpu_flops)          0 if none
    T_link = link_latency   + |copied| S / link_bytes_per_s + g(min n over copied)                  0 if none
    T_dram = (|cpu| + |copied|) S / dram_bytes_per_s
    T_dev  = device_latency + sum over cached and copied of g(n_e)                                  0 if none
    T_both = split_latency, and where the device is the CPU T_cpu + T_dev if that is more           0 if either is
    T      = max(T_cpu, T_link, T_dram, T_dev, T_both)

Of the experts that are not cached, sorted by falling n, the first i are copied and the rest stays on the CPU, for the i
of least T (the fewest copies of equal ones). That is the best of all splits where T_dev does not decide; where it does,
and the device has at least 5 times the CPU's bytes per second and 10 times its operations, T was at most 8 % above the
best of all splits in 12000 random draws (tests/offload/test_plan.py draws again, and holds it to 10 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from .costs import Costs

_OP = "offload.plan"
_LANES = ("cpu", "link", "dram", "device", "both")


@dataclass(frozen=True)
class Plan:
    """Where each expert that has tokens is computed, and what that is expected to take.

    cached, cpu    ids, ascending
    copied         ids in the order of their copies: the largest n first, of equal ones the lower id
    predicted      T, in seconds
    lane_times     T_cpu, T_link, T_dram and T_dev as "cpu", "link", "dram", "device"; where costs have one, T_both as
                   "both"
    limiting       what has the largest time; "none" when there is nothing to do
    """

    cached: tuple[int, ...]
    copied: tuple[int, ...]
    cpu: tuple[int, ...]
    predicted: float
    lane_times: dict[str, float]
    limiting: str


def plan(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int], costs: Costs) -> Plan:
    """The split of least T over one link and one CPU

    counts   tokens of each expert of a layer: E whole numbers of at least 0
    cached   ids of the experts that are on the device already; those without tokens are in no part of the plan
    Raises ValueError for a negative count and for an id out of range.
    """
    n, there = _arguments(counts, cached)
    used = n > 0
    held = (used & there).nonzero()[0]
    missing = (used > there).nonzero()[0]
    tokens = n[missing]
    falling = (-tokens).argsort(kind="stable")
    missing, tokens = missing[falling], tokens[falling]
    ids, count = missing.tolist(), len(missing)

    floors, each, per_copy, per_read = _terms(costs)
    both = tokens * each  # on the CPU, on the device
    np.maximum(both, floors, out=both)
    sums = np.zeros((2, count + 1))
    both[0].cumsum(out=sums[0, 1:])  # one by one: along an axis it takes 6 us more
    both[1].cumsum(out=sums[1, 1:])
    of_held = float(np.maximum(n[held] * each[1], floors[1]).sum()) if len(held) else 0.0

    times = np.zeros((5 if costs.split_latency or costs.shared else 4, count + 1))
    cpu, link, dram, device = times[:4]
    np.subtract(sums[0, -1] + costs.cpu_latency, sums[0], out=cpu)
    cpu[-1] = 0.0
    np.multiply(_upto(count), per_copy, out=link[1:])
    link[1:] += both[1]
    link[1:] += costs.link_latency
    dram += count * per_read
    np.add(sums[1], of_held + costs.device_latency, out=device)
    if not len(held):
        device[0] = 0.0

    if len(times) == 5:
        both = cpu + device if costs.shared else times[4]
        np.maximum(both, costs.split_latency, out=times[4], where=(cpu > 0) & (device > 0))

    best = int(times.max(0).argmin())
    lanes = dict(zip(_LANES, times[:, best].tolist()))
    limiting = max(lanes, key=lanes.__getitem__)
    return Plan(
        tuple(held.tolist()), tuple(ids[:best]), tuple(sorted(ids[best:])), lanes[limiting], lanes,
        limiting if ids or len(held) else "none",
    )  # fmt: skip


_UP = np.arange(1, 1025, dtype=np.float64)


def _upto(count: int) -> np.ndarray:
    """1, 2, .., count"""
    return _UP[:count] if count <= len(_UP) else np.arange(1, count + 1, dtype=np.float64)


@lru_cache(maxsize=64)
def _terms(costs: Costs) -> tuple[np.ndarray, np.ndarray, float, float]:
    """On the CPU and on the device: seconds an expert takes at least, and by token; by copy, and by read of DRAM."""
    size, work = costs.expert_bytes, costs.flops_per_token
    floors = np.array([[size / costs.cpu_bytes_per_s], [size / costs.device_bytes_per_s]])
    each = np.array([[work / costs.cpu_flops], [work / costs.device_flops]])
    return floors, each, size / costs.link_bytes_per_s, size / costs.dram_bytes_per_s


def on_cpu(counts: Sequence[int] | Tensor | np.ndarray, costs: Costs) -> Plan:
    """All of a call's experts on the CPU, those that are cached as well."""
    n, _ = _arguments(counts, ())
    ids = n.nonzero()[0]
    lanes = dict.fromkeys(_LANES[:4], 0.0)
    if not len(ids):
        return Plan((), (), (), 0.0, lanes, "none")
    floors, each, _, per_read = _terms(costs)
    lanes["cpu"] = costs.cpu_latency + float(np.maximum(n[ids] * each[0], floors[0]).sum())
    lanes["dram"] = len(ids) * per_read
    limiting = max(lanes, key=lanes.__getitem__)
    return Plan((), (), tuple(ids.tolist()), lanes[limiting], lanes, limiting)


def quickest(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int], costs: Costs) -> Plan:
    """`plan`, or `on_cpu` where that is quicker: a call may be so small that to ask the device takes longer."""
    split, alone = plan(counts, cached, costs), on_cpu(counts, costs)
    return alone if alone.predicted <= split.predicted else split


def predict_stream(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int], costs: Costs) -> float:
    """Seconds of a layer all of whose experts are streamed to the device while the layer before it is computed

    max(link_latency + m S / link_bytes_per_s, m S / dram_bytes_per_s, device_latency + sum over all of g(n_e)), for
    the m experts that are not cached, with tokens or without: what the next layer needs is not known when its copy
    begins.
    """
    n, there = _arguments(counts, cached)
    moved = float(len(n) - np.count_nonzero(there)) * costs.expert_bytes
    used = n[n > 0]
    link = costs.link_latency + moved / costs.link_bytes_per_s if moved else 0.0
    floors, each, _, _ = _terms(costs)
    device = costs.device_latency + float(np.maximum(used * each[1], floors[1]).sum()) if len(used) else 0.0
    return max(link, moved / costs.dram_bytes_per_s, device)


def _arguments(counts: Any, cached: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """counts as whole numbers, and which ids are cached."""
    n = np.asarray(counts.numpy() if isinstance(counts, Tensor) else counts)
    if n.ndim != 1 or n.dtype.kind not in "iu" and n.size:
        raise TypeError(f"{_OP}: counts has the shape {list(n.shape)} and {n.dtype} numbers, wanted E whole numbers")
    n = n.astype(np.int64, copy=False)
    if n.size and n.min() < 0:
        expert = int(np.flatnonzero(n < 0)[0])
        raise ValueError(f"{_OP}: counts[{expert}] is {int(n[expert])}, wanted a number of tokens, at least 0")
    there = np.zeros(len(n), dtype=bool)
    ids = np.fromiter(cached, dtype=np.int64)
    if ids.size:
        if ids.min() < 0 or ids.max() >= len(n):
            wrong = int(ids[(ids < 0) | (ids >= len(n))][0])
            raise ValueError(f"{_OP}: cached has the expert {wrong}, wanted 0..{len(n) - 1}")
        there[ids] = True
    return n, there
