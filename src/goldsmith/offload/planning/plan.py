"""The scheduler, a pure function: which of a call's experts are computed on the CPU, copied, or read from the cache.

An expert has S bytes and n_e tokens. t(n) and g(n) are its seconds on the CPU and on the device, t'(n) on the CPU while
copies run. c and c' = S / (bytes per second) are the seconds of a copy, alone and while the CPU computes. `Costs` holds
all of these.

    C, C'  = sums over cpu of t(n_e) and of t'(n_e);  L, L' = |copied| c and |copied| c'
    T_cpu  = cpu_latency    + min(C', C + L' (1 - C / C'))                                         0 if none
    T_link = link_latency   + min(L', L + C' (1 - L / L')) + g(min n over copied)                   0 if none
    T_dram = (|cpu| + |copied|) S / dram_bytes_per_s
    T_dev  = device_latency + sum over cached and copied of g(n_e)                                  0 if none
    T_both = split_latency, or T_cpu + T_dev if that is more and the device is the CPU             0 if either is 0
    T      = max(T_cpu, T_link, T_dram, T_dev, T_both)

If no lane slows another one, C' = C and L' = L, and T_cpu and T_link are plain sums. Otherwise both lanes begin at once
and are slow until the first one finishes: by then the other one, if it is the CPU, has done C L' / C' of its work, or L
C' / L' if it is the link. It does the rest alone.

Sort the experts that are not cached by descending n. For every i, the first i could be copied while the others stay on
the CPU. The plan takes the i with the smallest T (the fewest copies if several are equal). Of all ways to copy i
experts, this one leaves the CPU the smallest C and C', because t and t' never decrease with n. A smaller C or C' never
makes T_cpu or T_link larger. Otherwise T depends on the choice only through g. So the split is optimal if the device
takes no time. If T_dev decides, T was at most 8 % above the optimum in 12000 random draws of rates (the device at least
5 times the CPU's bytes and 10 times its operations), and at most 5 % in 12000 draws of curves (the device at most a
tenth of the CPU's time). tests/offload/test_plan.py draws again, and holds both to 10 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .costs import Costs

_OP = "offload.plan"
_LANES = ("cpu", "link", "dram", "device", "both")


@dataclass(frozen=True)
class Plan:
    """The lane of each expert that has tokens, and the predicted time.

    cached, cpu    ids, ascending
    copied         ids in the order of their copies: the largest n first, then the lower id
    predicted      T, in seconds
    lane_times     T_cpu, T_link, T_dram and T_dev as "cpu", "link", "dram", "device"; if the costs define it, T_both as
                   "both"
    limiting       the largest of these; "none" if there is nothing to do
    """

    cached: tuple[int, ...]
    copied: tuple[int, ...]
    cpu: tuple[int, ...]
    predicted: float
    lane_times: dict[str, float]
    limiting: str


def plan(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int], costs: Costs) -> Plan:
    """The split with the smallest T over one link and one CPU


    counts   tokens of each expert of a layer: E whole numbers of at least 0
    cached   ids of the experts on the device; the plan ignores those without tokens
    Raises ValueError for a negative count and for an id out of range.
    """
    n, is_cached = _arguments(counts, cached)
    used = n > 0
    resident = (used & is_cached).nonzero()[0]
    missing = (used > is_cached).nonzero()[0]
    tokens = n[missing]
    falling = (-tokens).argsort(kind="stable")
    missing, tokens = missing[falling], tokens[falling]
    ids, count = missing.tolist(), len(missing)

    size = costs.expert_bytes
    per_copy, device_each = size / costs.link_bytes_per_s, np.interp(tokens, *costs.device)
    computed, device_copied = (
        np.interp(tokens, *costs.cpu).cumsum(),
        device_each.cumsum(),
    )  # running sums over the first 1, 2, .. experts
    device_resident = float(np.interp(n[resident], *costs.device).sum()) if len(resident) else 0.0

    times = np.zeros((5 if costs.split_latency or costs.shared else 4, count + 1))
    cpu, link, dram, device = times[:4]
    if count:
        cpu[0] = computed[-1]
        np.subtract(computed[-1], computed[:-1], out=cpu[1:-1])
        np.multiply(_one_to(count), per_copy, out=link[1:])
        if count > 1 and costs.contended:
            _apply_contention(cpu[1:-1], link[1:-1], tokens, costs)
        cpu[:-1] += costs.cpu_latency
        link[1:] += device_each
        link[1:] += costs.link_latency
        dram += count * size / costs.dram_bytes_per_s
    device += device_resident + costs.device_latency
    device[1:] += device_copied
    if not len(resident):
        device[0] = 0.0

    if len(times) == 5:
        both = cpu + device if costs.shared else times[4]
        np.maximum(both, costs.split_latency, out=times[4], where=(cpu > 0) & (device > 0))

    best = int(times.max(0).argmin())
    lanes = dict(zip(_LANES, times[:, best].tolist()))
    limiting = max(lanes, key=lanes.__getitem__)
    return Plan(
        tuple(resident.tolist()), tuple(ids[:best]), tuple(sorted(ids[best:])), lanes[limiting], lanes,
        limiting if ids or len(resident) else "none",
    )  # fmt: skip


_UP = np.arange(1, 1025, dtype=np.float64)


def _one_to(count: int) -> np.ndarray:
    """1, 2, .., count"""
    return _UP[:count] if count <= len(_UP) else np.arange(1, count + 1, dtype=np.float64)


def _apply_contention(cpu: np.ndarray, link: np.ndarray, tokens: np.ndarray, costs: Costs) -> None:
    """Replaces C and L of each split that uses both lanes by min(C', C + L' (1 - C / C')) and min(L', L + C' (1 - L /
    L')).
    """
    beside = np.interp(tokens, *costs.cpu_beside).cumsum()
    cpu_beside = beside[-1] - beside[:-1]
    alone = costs.link_beside_bytes_per_s / costs.link_bytes_per_s if costs.link_beside_bytes_per_s else 1.0
    link_beside = link / alone
    slow_cpu = cpu + link_beside * (1.0 - cpu / cpu_beside)
    np.minimum(link_beside, link + cpu_beside * (1.0 - alone), out=link)
    np.minimum(cpu_beside, slow_cpu, out=cpu)


def on_cpu(counts: Sequence[int] | Tensor | np.ndarray, costs: Costs) -> Plan:
    """The plan with all of a call's experts on the CPU, even the cached ones."""
    n, _ = _arguments(counts, ())
    ids = n.nonzero()[0]
    lanes = dict.fromkeys(_LANES[:4], 0.0)
    if not len(ids):
        return Plan((), (), (), 0.0, lanes, "none")
    lanes["cpu"] = costs.cpu_latency + float(np.interp(n[ids], *costs.cpu).sum())
    lanes["dram"] = len(ids) * costs.expert_bytes / costs.dram_bytes_per_s
    limiting = max(lanes, key=lanes.__getitem__)
    return Plan((), (), tuple(ids.tolist()), lanes[limiting], lanes, limiting)


def quickest(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int], costs: Costs) -> Plan:
    """`plan`, or `on_cpu` if that is quicker: for a small call the device's latency can cost more than it saves."""
    split, alone = plan(counts, cached, costs), on_cpu(counts, costs)
    return alone if alone.predicted <= split.predicted else split


def predict_stream(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int], costs: Costs) -> float:
    """Seconds of a layer whose experts are all streamed to the device while the layer before it is computed

    max(link_latency + m S / link_bytes_per_s, m S / dram_bytes_per_s, device_latency + sum over all of g(n_e)), for
    the m experts that are not cached, whether they have tokens or not: the copy begins before the next layer's routing
    is known.
    """
    return max(stream_times(counts, cached, costs).values())


def stream_times(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int], costs: Costs) -> dict[str, float]:
    """The three terms of `predict_stream`, named as in Plan.lane_times: "link", "dram", "device"."""
    n, is_cached = _arguments(counts, cached)
    copied = float(len(n) - np.count_nonzero(is_cached)) * costs.expert_bytes
    used = n[n > 0]
    link = costs.link_latency + copied / costs.link_bytes_per_s if copied else 0.0
    device = costs.device_latency + float(np.interp(used, *costs.device).sum()) if len(used) else 0.0
    return {"link": link, "dram": copied / costs.dram_bytes_per_s, "device": device}


def _arguments(counts: Sequence[int] | Tensor | np.ndarray, cached: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """counts as whole numbers, and a mask of the cached ids."""
    n = np.asarray(counts.numpy() if isinstance(counts, Tensor) else counts)
    if n.ndim != 1 or n.dtype.kind not in "iu" and n.size:
        raise TypeError(f"{_OP}: counts has the shape {list(n.shape)} and dtype {n.dtype}, expected E whole numbers")
    n = n.astype(np.int64, copy=False)
    if n.size and n.min() < 0:
        expert = int(np.flatnonzero(n < 0)[0])
        raise ValueError(f"{_OP}: counts[{expert}] is {int(n[expert])}, expected a number of tokens, at least 0")
    is_cached = np.zeros(len(n), dtype=bool)
    ids = np.fromiter(cached, dtype=np.int64)
    if ids.size:
        if ids.min() < 0 or ids.max() >= len(n):
            wrong = int(ids[(ids < 0) | (ids >= len(n))][0])
            raise ValueError(f"{_OP}: cached has the expert {wrong}, expected 0..{len(n) - 1}")
        is_cached[ids] = True
    return n, is_cached
