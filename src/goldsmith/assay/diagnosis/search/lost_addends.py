"""Lost addends of a tensor whose last step is linear: a sum, a product, an addition at indices, a gradient.

This covers gradients of rows that are read several times, of a padded border, and scatters that the golden writes as
products with one-hot rows. The addends of each place are known, and the candidate's values say which of them are left.
Addends lost everywhere are a part that never arrives; if the last of several that meet survives, a store stands where
an addition should.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from ..edits.golden_edit import RESULT, NamedEdit, do, named
from ..edits.primitives.tensors import replace_by
from ..edits.reductions import one_axis
from ..graph.node import Key, Node, maker_of
from ..graph.tensors import floating
from .judge import Judge

# at most: elements of the incoming gradient, of the result, and pairs of both
_SENT, _PLACES, _PAIRS = 1024, 8192, 2**21
_ALL = 8  # up to this many addends every subset is tried; beyond it prefixes, suffixes, single ones, and all but one
_MOST = 64
_WRONG = 3  # wrong places, at least
_CHANCE = 1e-3  # probability that a subset of the addends makes a number by accident
_AT_INDICES = frozenset("index_put index_put_ index_add index_add_ scatter_add embedding_dense_backward".split())
_SCALED = _AT_INDICES | {"mm", "bmm", "unfold_backward"}
_NUMBERS = 1 << 20  # addends of a sum of the forward, at most
_SPARSE = 0.5  # share of its addends: with more nonzero ones it is not a scatter


def changes(calls: Sequence[Node], among: set[int], judge: Judge) -> Iterator[NamedEdit]:
    for call in calls:
        made = call.index in among and floating(call.out) and call.out.numel() == judge.golden.numel()
        if not made or call.backward and call.out.numel() > _PLACES:
            continue
        out, golden = call.out.detach().reshape(-1), judge.golden.reshape(-1)
        times = torch.ones_like(golden)
        if not torch.equal(out, golden):  # later operators may scale each place
            if not call.backward or call.name not in _SCALED or bool(((out == 0) != (golden == 0)).any()):
                continue
            times = torch.where(golden == 0, times, golden / out)
        change = _change(calls, call, judge, times)
        if change is not None:
            yield replace(change, redone=lambda calls, judge: changes(calls, set(range(len(calls))), judge))


def _linear(calls: Sequence[Node], call: Node, i: int, a: object) -> bool:
    """Whether the result is linear in the i-th argument, which is the incoming gradient, and has no other addend."""
    if not isinstance(a, Tensor) or not floating(a) or not 1 < a.numel() <= _SENT or call.func is None:
        return False
    key: Key = call.makers[sum(isinstance(b, Tensor) for b in call.args[:i])]
    maker = maker_of(calls, key)
    if call.backward and not (maker.backward if maker is not None else str(key).startswith("grad_")):
        return False
    results = [_result_with(call, i, t) for t in (torch.zeros_like(a), -2 * a)]
    return not bool(results[0].any()) and torch.allclose(results[1], -2 * call.out, rtol=1e-9, atol=0)


def _result_with(call: Node, i: int, t: Tensor) -> Tensor:
    args = [b.clone() if isinstance(b, Tensor) else b for b in call.args]
    args[i] = t
    return call.func(*args, **call.kwargs)


Addends = tuple[
    Tensor, Tensor, Tensor | None
]  # addends by place, the number of each, and the tensor that they are from


def _addends(calls: Sequence[Node], call: Node) -> Addends | None:
    """The addends of each place; None if they are not known.

    An addend of a sum is known by its position on all axes but the last of the result, along which it is dealt.
    """
    if call.backward or call.name in _AT_INDICES:
        at = next((i for i, a in enumerate(call.args) if _linear(calls, call, i, a)), None)
        if at is not None:
            return _sent(call, at)
    axis = one_axis(call) if call.name == "sum" and call.args[0].dim() > 1 else None
    if axis is not None and call.args[0].numel() <= _NUMBERS:
        addends = call.args[0].movedim(axis, -1)
    elif call.name in ("mm", "bmm") and call.out.numel() * call.args[0].shape[-1] <= _NUMBERS:
        addends = call.args[0].unsqueeze(-2) * call.args[1].mT.unsqueeze(-3)
    else:
        return None
    if addends.dim() < 2 or float((addends != 0).double().mean()) >= _SPARSE:
        return None
    each = torch.arange(addends.select(-2, 0).numel(), device=addends.device).reshape(addends.select(-2, 0).shape)
    n = addends.shape[-1]
    return addends.detach().reshape(-1, n), each.unsqueeze(-2).expand(addends.shape).reshape(-1, n), None


def _sent(call: Node, at: int) -> Addends | None:
    """The addends that each element of the incoming gradient, or of the added rows, makes."""
    sent = call.args[at].detach()
    if sent.numel() * call.out.numel() > _PAIRS:
        return None
    units = torch.zeros_like(sent, memory_format=torch.contiguous_format)
    rows = []
    for i in range(sent.numel()):
        units.view(-1)[i] = sent.reshape(-1)[i]
        rows.append(_result_with(call, at, units).reshape(-1))
        units.view(-1)[i] = 0.0
    addends = torch.stack(rows, 1).detach()
    return addends, torch.arange(len(rows), device=addends.device).expand(addends.shape), sent


def _change(calls: Sequence[Node], call: Node, judge: Judge, times: Tensor) -> NamedEdit | None:
    known = _addends(calls, call)
    if known is None:
        return None
    wrong = judge.wrong_at.reshape(-1) & judge.finite.reshape(-1)
    addends, which, sent = known[0][wrong], known[1][wrong], known[2]
    most = int((addends != 0).sum(1).max()) if len(addends) >= _WRONG else 0
    if not 1 < most <= _MOST:
        return None
    source = (addends != 0).double().sort(dim=1, descending=True, stable=True).indices[:, :most]
    addends, source = addends.gather(1, source), which.gather(1, source)
    got, bound = (judge.got.reshape(-1) / times)[wrong], (judge.bound.reshape(-1) / times.abs())[wrong]
    choices = _choices(most).to(addends.device)
    if float((bound / addends.abs().amax(1).clamp_min(1e-300)).median()) * len(choices) > _CHANCE:
        return None
    subsets = addends @ choices.T
    away = (subsets - got[:, None]).abs() + 1e-9 * bound[:, None] * (choices.shape[1] - choices.sum(1))
    best = away.argmin(1, keepdim=True)
    value = subsets.gather(1, best).squeeze(1)
    if bool(((value - got).abs() > 4 * bound).any()):
        return None
    whole = call.out.detach().reshape(-1).clone()
    whole[wrong] = value
    kept = choices[best.squeeze(1)]
    if sent is None:
        right = set(known[1][~wrong][known[0][~wrong] != 0].tolist())
        cause, how, also = _dealt(addends, kept, source, right)
    else:
        cause, how, also = _read(addends, kept, source, call.name in _AT_INDICES)
    if not call.backward and sent is not None and cause != "lost_update":
        return None  # a part of the rows that are added: edits of the operator say which part
    text = f"of the addends of {call.expression} {how}"
    return named(call, cause, 0.5, text, (RESULT, do(replace_by, new=whole)), also=also, addends=most)


def _dealt(addends: Tensor, kept: Tensor, source: Tensor, right: set[int]) -> tuple[str, str, tuple[str, ...]]:
    """Of a scatter: an addend that arrives at some of its places only was overwritten at the others."""
    come, gone = (set(source[(addends != 0) & side].tolist()) for side in (kept > 0, kept == 0))
    if gone & (come | right):
        single = bool((((addends != 0) & (kept > 0)).sum(1) == 1).all())
        how = "some are left in each element, not the same ones everywhere"
        if single:
            how = "one is left: a store stands where an addition should"
        return "lost_update", how, ("overwritten_accumulator",)
    return "missing_term", "some are lost", ("lost_update", "truncated_reduction")


def _choices(n: int) -> Tensor:
    if n <= _ALL:
        kept = [set(c) for size in range(n) for c in combinations(range(n), size)]
    else:
        kept = [set(range(i)) for i in range(n)] + [set(range(i, n)) for i in range(1, n)]
        kept += [{i} for i in range(1, n - 1)] + [set(range(n)) - {i} for i in range(1, n - 1)]
    return torch.tensor([[float(i in k) for i in range(n)] for k in kept], dtype=torch.float64)


def _read(addends: Tensor, kept: Tensor, source: Tensor, at_indices: bool) -> tuple[str, str, tuple[str, ...]]:
    """(cause, description, other causes) of the addends left at each wrong place."""
    there = addends != 0
    left, lost = there & (kept > 0), there & (kept == 0)
    count = left.sum(1)
    gone, come = (set(source[t].tolist()) for t in (lost, left))
    if at_indices and come and min(gone) > max(come):
        return "truncated_reduction", "the last updates are lost", ("lost_update", "missing_term")
    if bool((count == 0).any()):
        return "missing_term", "none are left in some elements", ("truncated_reduction", "wrong_mask")
    place = torch.arange(addends.shape[1], device=addends.device).expand_as(addends)
    last = bool((torch.where(lost, place, -1).amax(1) < torch.where(left, place, addends.shape[1]).amin(1)).all())
    first = bool((torch.where(left, place, -1).amax(1) < torch.where(lost, place, addends.shape[1]).amin(1)).all())
    if bool(there.all()) and bool((kept == kept[:1]).all()) and (first or last):  # one part of a whole axis
        text = f"the {'last' if last else 'first'} {int(count[0])} of {addends.shape[1]} are left everywhere"
        if last:
            return "overwritten_accumulator", text, ("truncated_reduction", "lost_update")
        return "truncated_reduction", text, ("off_by_one", "missing_term")
    if last:
        how = "the last one is left" if bool((count == 1).all()) else "the last ones are left"
        also: tuple[str, ...] = ("overwritten_accumulator", "truncated_reduction")
        return "lost_update", f"{how} in each element: a store stands where an addition should", also
    if not at_indices and not gone & come:
        return "missing_term", f"{len(gone)} are lost in every element", ("truncated_reduction", "wrong_mask")
    also = ("overwritten_accumulator", "missing_term")
    return "lost_update", "some are left in each element, not the same ones everywhere", also
