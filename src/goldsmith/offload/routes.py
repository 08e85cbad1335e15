"""The routes (token, slot) of a call in the order in which its lanes compute them: by lane, then by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from .routing import FEW


@dataclass(frozen=True)
class Sorted:
    """P routes that are not skipped.

    order   [P] the route of each sorted row. place: [T k] int32, the sorted row of each route, -1 where it is skipped.
            Both are lists where the routes are few
    start   {expert: its first sorted row}; of `first`, whose rows come first, `leading` rows in all
    """

    order: Tensor | list[int]
    place: Tensor | list[int]
    start: dict[int, int]
    leading: int


def sort_routes(ids: Tensor, counts: Sequence[int], first: Sequence[int]) -> Sorted:
    """ids [T, k] on the CPU, -1 where a slot is skipped; the experts `first` lead, each group in ascending order."""
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
    rank = torch.full((len(counts) + 1,), len(experts))  # -1 reads the last one, and comes behind all
    rank[experts] = torch.arange(len(experts))
    order = rank[ids.reshape(-1).long()].argsort(stable=True)[:at]
    place = torch.full((ids.numel(),), -1, dtype=torch.int32)
    place[order] = torch.arange(at, dtype=torch.int32)
    return Sorted(order, place, start, sum(counts[e] for e in leading))


def _sort_few(ids: Tensor, start: dict[int, int], rows: int, leading: int) -> Sorted:
    """The same for few routes, without torch's cost of an operation."""
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
    return Sorted(order, place, start, leading)
