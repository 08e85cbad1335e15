"""The routes of a call in the order in which its lanes compute them: by lane, then by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from torch import Tensor

from .call_checks import FEW


@dataclass(frozen=True)
class SortedRoutes:
    """The order of the P routes that are not skipped.

    order   [P] the route of each sorted row. place: [T k] int32, the sorted row of each route, -1 if it is skipped.
            Both are lists for few routes, otherwise numpy arrays. Torch operations would wake torch's threads, which
            stay awake for 12 ms and take cores from the lane's (gather and scatter of 4,096 do, on an H100's host)
    start   {expert: its first sorted row}; the `first` experts' rows come first, `leading` rows in all
    """

    order: np.ndarray | list[int]
    place: np.ndarray | list[int]
    start: dict[int, int]
    leading: int


def sort_routes(ids: Tensor, counts: Sequence[int], first: Sequence[int]) -> SortedRoutes:
    """ids [T, k] on the CPU, -1 for a skipped route. The experts `first` come first; each group is in ascending
    order.
    """
    leading = sorted(first)
    experts = list(compress(range(len(counts)), counts))
    if leading:
        ahead = set(leading)
        experts = leading + [e for e in experts if e not in ahead]
    start, at = {}, 0
    for e in experts:
        start[e] = at
        at += counts[e]
    if ids.numel() <= FEW:
        return _sort_few(ids, start, at, sum([counts[e] for e in leading]))
    narrow = np.min_scalar_type(len(experts))  # numpy radix-sorts 8 and 16 bits
    rank = np.full(len(counts) + 1, len(experts), dtype=narrow)  # -1 reads the last one, and sorts behind all
    rank[experts] = np.arange(len(experts), dtype=narrow)
    order = rank[ids.numpy().reshape(-1)].argsort(kind="stable")[:at]
    place = np.full(ids.numel(), -1, dtype=np.int32)
    place[order] = np.arange(at, dtype=np.int32)
    return SortedRoutes(order, place, start, sum(counts[e] for e in leading))


def _sort_few(ids: Tensor, start: dict[int, int], rows: int, leading: int) -> SortedRoutes:
    """`sort_routes` for few routes, without torch's overhead."""
    free = dict(start)
    order, place = [0] * rows, []
    for route, expert in enumerate(ids.reshape(-1).tolist()):
        if expert < 0:
            place.append(-1)
            continue
        at = free[expert]
        free[expert] = at + 1
        order[at] = route
        place.append(at)
    return SortedRoutes(order, place, start, leading)
