"""How tensors lie on a mesh of ranks: a rank's part of a whole tensor, and the whole tensor of all ranks' parts.

The rules are DTensor's: mesh dimensions cut one after the other, `Shard(i)` cuts axis i into chunks of equal size, of
which the last ones may be smaller or empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Coordinates = tuple[int, ...]
Placed = tuple[Any, ...]  # one Placement for each dimension of the mesh


def coordinates(sizes: Sequence[int]) -> list[Coordinates]:
    """The place of every rank on the mesh, in the order of ranks."""
    return list(itertools.product(*(range(size) for size in sizes)))


def ranges(shape: Sequence[int], placed: Placed, at: Coordinates, sizes: Sequence[int]) -> dict[int, tuple[int, int]]:
    """{axis: (first, behind the last)} of the rank's part, for the axes that are sharded."""
    spans: dict[int, tuple[int, int]] = {}
    for placement, place, size in zip(placed, at, sizes, strict=True):
        if placement.is_shard():
            axis = placement.dim % len(shape)
            first, last = spans.get(axis, (0, shape[axis]))
            rows = -(-(last - first) // size)
            begin = min(last, first + place * rows)
            spans[axis] = (begin, min(last, begin + rows))
    return spans


def part(whole: Tensor, placed: Placed, at: Coordinates, sizes: Sequence[int]) -> Tensor:
    """The rank's part; of a tensor that is `Partial`, the first rank has all and the others zeros."""
    for axis, (first, last) in ranges(whole.shape, placed, at, sizes).items():
        whole = whole.narrow(axis, first, last - first)
    if any(p.is_partial() and place for p, place in zip(placed, at, strict=True)):
        whole = torch.zeros_like(whole)
    return whole


def assembled(parts: Sequence[Tensor], placed: Placed, sizes: Sequence[int], view: Coordinates) -> Tensor:
    """The whole tensor of all ranks' parts: shards joined, partial sums added in rank order.

    Of replicas, `view` chooses: the one of the rank that has these coordinates in the replicated dimensions.
    """
    rows = list(parts)
    for placement, size, chosen in reversed(list(zip(placed, sizes, view, strict=True))):
        groups = [rows[at : at + size] for at in range(0, len(rows), size)]
        if placement.is_shard():
            rows = [torch.cat(group, placement.dim) for group in groups]
        elif placement.is_partial():
            rows = [_sum(group) for group in groups]
        else:
            rows = [group[chosen] for group in groups]
    return rows[0]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for other in parts[1:]:
        total = total + other
    return total


def kept(shape: Sequence[int], placed: Placed, ranks: Sequence[Coordinates], sizes: Sequence[int]) -> dict[int, Tensor]:
    """{axis: the indices that one of these ranks has}, for the sharded axes."""
    owned: dict[int, set[int]] = {}
    for at in ranks:
        for axis, (first, last) in ranges(shape, placed, at, sizes).items():
            owned.setdefault(axis, set()).update(range(first, last))
    return {axis: torch.tensor(sorted(indices), dtype=torch.int64) for axis, indices in owned.items()}


def is_sharded(placed: Placed) -> bool:
    return any(p.is_shard() for p in placed)
