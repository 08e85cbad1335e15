"""Sums in which only some addends survive at each place, because a kernel stores where it should add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, whole
from ..change import Change, with_result
from ..judge import Judge

_MOST = 64  # updates of one place
_SUBSETS = 8  # most addends of a place whose subsets are tried
_CHANCE = 1e-3  # probability that a subset of the addends makes a number by accident


def changes(calls: Sequence[Node], judge: Judge) -> Iterator[Change]:
    """Changes of sums that make the golden's tensor; the candidate's values show which addends survive."""
    golden, got, bound = judge.golden, judge.got, judge.bound
    for call in calls:
        if not floating(call.out) or not call.out.numel():
            continue
        updates = _updates(call) if torch.equal(call.out.reshape(-1), golden.reshape(-1)) else None
        if updates is not None:
            yield from _at_indices(call, *updates, got.reshape(call.out.shape))
        if call.name == "sum":
            yield from _of_a_sum(call, calls, golden, got, bound)


def _of_a_sum(call: Node, calls: Sequence[Node], golden: Tensor, got: Tensor, bound: Tensor) -> Iterator[Change]:
    axes = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], list | tuple) else ()
    x = call.args[0]
    if len(axes) != 1 or x.dim() < 2:
        return
    if call.out.numel() == golden.numel() and torch.equal(call.out.reshape(golden.shape), golden):
        left = _left(x.movedim(axes[0], -1), got.reshape(call.out.shape).squeeze())
        if left is not None:
            text = f"of the addends of {call.expression} one is left: a store stands where an addition should"
            yield Change(
                "lost_update", text, call.index, with_result(lambda out, v=left: v.reshape(out.shape)), {}, 0.55
            )
    yield from _for_each(call, calls, golden, got, bound)


def _for_each(call: Node, calls: Sequence[Node], golden: Tensor, got: Tensor, bound: Tensor) -> Iterator[Change]:
    """A sum over an axis that is spread along it again, as ranks have it, possibly scaled."""
    x, axis = call.args[0], call.args[1][0]
    n, kept = x.shape[axis], x.sum(axis, keepdim=True)
    if kept.dim() != golden.dim() or not 2 < n <= _SUBSETS or golden.shape[axis] < 2 or bool((kept == 0).any()):
        return
    x, kept = x.detach(), kept.detach()
    if any(one not in (1, of) for one, of in zip(kept.shape, golden.shape, strict=True)):
        return
    scale = golden / kept
    if not scale.numel() or float(scale.max() - scale.min()) > 1e-12 * float(scale.abs().max()):
        return
    makers = [c.index for c in calls if floating(c.out) and c.owns and torch.equal(c.out, golden)]
    nearest = _some(x.movedim(axis, -1).unsqueeze(axis).expand(*golden.shape, n) * scale.mean(), golden, got, bound)
    if nearest is None or not makers:
        return
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


def _updates(call: Node) -> tuple[Tensor, Tensor] | None:
    """(destination rows, updates) of an indexed addition to zeros, including gradients of rows that were read."""
    a = call.args
    if call.name in ("index_add", "index_add_") and not a[1] % max(call.out.dim(), 1) and not bool(a[0].any()):
        return (a[2], a[3]) if a[2].dim() == 1 else None
    added = call.name in ("index_put", "index_put_") and len(a) > 3 and a[3] and len(a[1]) == 1
    if added and whole(a[1][0]) and not bool(a[0].any()):
        index, source = a[1][0].reshape(-1), a[2]
    elif call.name == "embedding_dense_backward":
        index, source = a[1].reshape(-1), a[0]
    else:
        return None
    rows = (len(index), *call.out.shape[1:])
    return (index, source.reshape(rows)) if source.numel() == call.out[:1].numel() * len(index) else None


def _at_indices(call: Node, index: Tensor, source: Tensor, got: Tensor) -> Iterator[Change]:
    """The same for an indexed addition: which of several updates of a place survives depends on their order."""
    if not len(index) or int(index.min()) < 0:
        return
    most = int(torch.bincount(index).max())
    if not 1 < most <= _MOST:
        return
    addends = torch.zeros(*call.out.shape, most, dtype=call.out.dtype, device=call.out.device)
    seen = [0] * len(call.out)
    for row, place in enumerate(index.tolist()):
        addends[place, ..., seen[place]] = source[row]
        seen[place] += 1
    left = _left(addends, got)
    if left is not None:
        text = f"of several updates of one element by {call.expression} one is left: it stores instead of adding"
        change = with_result(lambda out, v=left: v.reshape(out.shape))
        yield Change("lost_update", text, call.index, change, {}, 0.55, also=("overwritten_accumulator",))


def _left(addends: Tensor, got: Tensor) -> Tensor | None:
    """The addend nearest to the candidate's value, ignoring zeros; None if two of them never meet."""
    addends = addends.reshape(*got.shape, -1) if addends.numel() == got.numel() * addends.shape[-1] else addends
    if addends.shape[:-1] != got.shape or not bool(((addends != 0).sum(-1) > 1).any()):
        return None
    away = (addends - got.unsqueeze(-1)).abs().masked_fill(addends == 0, torch.inf)
    nearest = addends.gather(-1, away.argmin(-1, keepdim=True)).squeeze(-1)
    return torch.where((addends != 0).any(-1), nearest, 0.0)
