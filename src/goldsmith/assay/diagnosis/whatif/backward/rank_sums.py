"""Backward sums that each rank, or each block, computes alone, without reducing over all of them.

A mean, or an expanded sum, sends every place the gradient of all places. If only the gradient of the own rank arrives,
the result has the golden's shape and a part of each sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Key, Node
from ...graph.tensors import floating
from ..change import Change, with_result

_BLOCKS = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64, 128)


def changes(calls: Sequence[Node], among: set[int], numbers: Mapping[str, Any]) -> Iterator[Change]:
    groups: dict[tuple, list[tuple[int, Changed]]] = {}
    for call, x, own in _sums(calls, among):
        at = _addend(calls, call, among) or _spread(calls, call, among)
        if at is None:
            continue
        golden = x.sum(own, keepdim=True)
        for axis in own:
            n = x.shape[axis]
            for block, ranks in _blocks(n, numbers):
                share = _of_blocks(x, own, axis, block)
                for mean in (False, True):
                    sizes = torch.tensor([len(p) for p in torch.arange(n).split(block)], device=x.device)
                    times = (n / sizes.to(x.dtype)).repeat_interleave(sizes) if mean else torch.ones((), dtype=x.dtype)
                    shape = [n if d == axis and mean else 1 for d in range(x.dim())]
                    factor = (share / golden * times.reshape(shape if mean else [])).expand(x.shape)
                    factor = factor.reshape(at.out.shape)
                    change = with_result(lambda out, f=factor: out * f)
                    by = f"each of {ranks} ranks" if ranks else f"each block of {block}"
                    how = " and divides by its own length" if mean else ""
                    text = (
                        f"of {call.expression} {by} sums only its part of axis {axis}{how}: the sums are not combined"
                    )
                    params = {"axis": axis, "block": block}
                    cause, also = _named(ranks)
                    groups.setdefault((axis, block, n, mean), []).append((at.index, change))
                    yield Change(cause, text, at.index, change, params, 0.5 - 0.02 * mean, also=also)
    for (axis, block, n, mean), group in groups.items():
        if len({at for at, _ in group}) == len(group) > 1:
            ranks = next((r for b, r in _blocks(n, numbers) if b == block), 0)
            by = f"each of {ranks} ranks" if ranks else f"each block of {block}"
            how = " and divides by its own length" if mean else ""
            text = f"of {len(group)} sums {by} sums only its own part of axis {axis}{how}: the sums are not combined"
            cause, also = _named(ranks)
            params = {"axis": axis, "block": block}
            yield Change(cause, text, group[0][0], group[0][1], params, 0.5, group=tuple(group), also=also)


def _named(ranks: int) -> tuple[str, tuple[str, ...]]:
    if ranks:
        return "missing_partition", ("truncated_reduction", "missing_term")
    return "truncated_reduction", ("missing_partition", "missing_term")


def _blocks(n: int, numbers: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """(places of a block, number of ranks if the case has that number)"""
    rank_counts: dict[int, int] = {}
    for ranks in numbers.values():
        if isinstance(ranks, int) and not isinstance(ranks, bool) and 2 <= ranks <= n:
            rank_counts.setdefault(-(-n // ranks), ranks)
    for block in sorted({b for b in (*_BLOCKS, *rank_counts) if b < n}):
        yield block, rank_counts.get(block, 0)


def _of_blocks(x: Tensor, own: tuple[int, ...], axis: int, block: int) -> Tensor:
    """The sum of each block, spread over its places."""
    parts = [part.sum(own, keepdim=True).expand(_like(part, own, axis)) for part in x.split(block, axis)]
    return torch.cat(parts, axis)


def _like(part: Tensor, own: tuple[int, ...], axis: int) -> list[int]:
    return [1 if d in own and d != axis else size for d, size in enumerate(part.shape)]


def _spread(calls: Sequence[Node], call: Node, among: set[int]) -> Node | None:
    """The last operator after a sum whose result has the summed tensor's shape, with a value per place."""
    reached, last = {call.index}, None
    for other in calls[call.index + 1 :]:
        if other.index in among and reached.intersection(other.read):
            reached.add(other.index)
            same = isinstance(other.out, Tensor) and floating(other.out) and other.out.shape == call.args[0].shape
            if same and other.name in ("expand", "mul", "div"):
                last = other
    return last


def _sums(calls: Sequence[Node], among: set[int]) -> Iterator[tuple[Node, Tensor, tuple[int, ...]]]:
    """(sum of a backward, its addends, its axes), if no result is 0."""
    for call in calls:
        if not (call.backward and call.index in among and call.name == "sum" and floating(call.out)):
            continue
        axes = call.args[1] if len(call.args) > 1 else None
        x = call.args[0]
        if isinstance(axes, list | tuple) and x.dim() and not bool((call.out == 0).any()):
            yield call, x, tuple(sorted(a % x.dim() for a in axes))


def _addend(calls: Sequence[Node], call: Node, among: set[int]) -> Node | None:
    """The first addend of the summed tensor's size that has the sum as a factor."""
    reached: set[Key] = {call.index}
    size = call.args[0].numel()
    for other in calls[call.index + 1 :]:
        if other.index not in among or not reached.intersection(other.read):
            continue
        if other.name in ("add", "sub"):
            for key, t in zip(other.makers, other.tensors, strict=True):
                whole = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
                if key in reached and t.numel() == size and whole is not None and whole.owns:
                    return whole if whole.out.numel() == size and whole.out.is_contiguous() else None
        reached.add(other.index)
    return None
