"""Sums that ranks reduce, in which some addends are lost at each place, and not the same ones everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ..edits.reductions import one_axis
from ..graph.node import Node
from ..graph.tensors import floating
from .change import Change, with_result
from .judge import Judge

_SUBSETS = 8  # most addends of a place whose subsets are tried
_CHANCE = 1e-3  # probability that a subset of the addends makes a number by accident


def changes(calls: Sequence[Node], judge: Judge) -> Iterator[Change]:
    """Sums that are spread along their axis again, possibly scaled, and make the golden's tensor."""
    golden, got, bound = judge.golden, judge.got, judge.bound
    for call in calls:
        axis = one_axis(call) if call.name == "sum" and floating(call.out) and call.args[0].dim() > 1 else None
        if axis is None:
            continue
        x = call.args[0].detach()
        n, kept = x.shape[axis], x.sum(axis, keepdim=True)
        if kept.dim() != golden.dim() or not 2 < n <= _SUBSETS or golden.shape[axis] < 2 or bool((kept == 0).any()):
            continue
        if any(one not in (1, of) for one, of in zip(kept.shape, golden.shape, strict=True)):
            continue
        scale = golden / kept
        if not scale.numel() or float(scale.max() - scale.min()) > 1e-12 * float(scale.abs().max()):
            continue
        makers = [c.index for c in calls if floating(c.out) and c.owns and torch.equal(c.out, golden)]
        nearest = _some(x.movedim(axis, -1).unsqueeze(axis).expand(*golden.shape, n) * scale.mean(), golden, got, bound)
        if nearest is None or not makers:
            continue
        value, sizes = nearest
        how = "one" if sizes == {1} else f"all but one of {n}" if sizes == {n - 1} else "some"
        cause = "overwritten_accumulator" if sizes == {1} else "truncated_reduction"
        text = f"of the addends of {call.expression} {how} are left in each element, not the same ones everywhere"
        also = ("missing_partition", "lost_update") if sizes == {1} else ("missing_partition", "missing_term")
        params = {"addends": n, "left": sorted(sizes)}
        yield Change(cause, text, makers[-1], with_result(lambda out, v=value: v.clone()), params, 0.5, also=also)


def _some(addends: Tensor, golden: Tensor, got: Tensor, bound: Tensor) -> tuple[Tensor, set[int]] | None:
    """(the nearest subset sum at each place, how many addends it has where it differs from the golden)"""
    n = addends.shape[-1]
    size = addends.abs().mean().clamp_min(1e-300)
    if float((bound / size).mean()) * 2**n > _CHANCE:
        return None
    best, sizes = golden.clone(), torch.full(golden.shape, n, device=golden.device)
    for count in range(1, n):
        for chosen in combinations(range(n), count):
            value = addends[..., list(chosen)].sum(-1)
            nearer = (value - got).abs() < (best - got).abs()
            best, sizes = torch.where(nearer, value, best), torch.where(nearer, count, sizes)
    left = set(sizes[sizes < n].tolist())
    return (best, left) if left and bool(((best - got).abs() <= 16 * bound).all()) else None
