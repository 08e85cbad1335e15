"""Scatters written as sums in which most addends of each place are zero, such as products with one-hot rows.

A kernel adds to places by index. The candidate's values show which addends arrived. If an addend arrives at
only some of its places, another store overwrote it at the others. An addend that arrives nowhere was left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, with_result
from ..judge import Judge

_FULL = 0.5  # share of the addends: with more nonzero ones it is not a scatter
_MEET = 8  # addends of one place, at most
_NUMBERS = 1 << 20
_CHANCE = 1e-3  # probability that a subset of the addends makes a number by accident
_WRONG = 3  # wrong places, at least


def changes(calls: Sequence[Node], judge: Judge) -> Iterator[Change]:
    """Changes of the forward sums that make the golden's tensor."""
    golden = judge.golden.reshape(-1)
    for call in calls:
        if call.backward or not floating(call.out) or call.out.numel() != golden.numel():
            continue
        addends = _addends(call) if torch.equal(call.out.reshape(-1), golden) else None
        change = None if addends is None or not _sparse(addends) else _some_left(call, addends.detach(), judge)
        if change is not None:
            yield change


def _addends(call: Node) -> Tensor | None:
    """[..., n] of a sum over one axis or of a matrix product."""
    a = call.args
    if call.name == "sum" and len(a) > 1 and isinstance(a[1], list | tuple) and len(a[1]) == 1 and a[0].dim() > 1:
        return a[0].movedim(a[1][0], -1) if a[0].numel() <= _NUMBERS else None
    if call.name in ("mm", "bmm") and call.out.numel() * a[0].shape[-1] <= _NUMBERS:
        return a[0].unsqueeze(-2) * a[1].mT.unsqueeze(-3)
    return None


def _sparse(addends: Tensor) -> bool:
    """Whether most addends are zero, and some place has several nonzero ones."""
    there = addends != 0
    return float(there.double().mean()) < _FULL and 1 < int(there.sum(-1).max()) <= _MEET


def _some_left(call: Node, addends: Tensor, judge: Judge) -> Change | None:
    got, bound, golden = (t.reshape(addends.shape[:-1]) for t in (judge.got, judge.bound, judge.golden))
    wrong = (judge.wrong_at & judge.finite).reshape(addends.shape[:-1])
    if int(wrong.sum()) < _WRONG or not bool(judge.finite.all()):
        return None
    most = int((addends != 0).sum(-1).max())
    first = (addends != 0).byte().sort(dim=-1, descending=True, stable=True).indices[..., :most]
    here = addends.gather(-1, first)[wrong]  # the nonzero addends of each wrong place, followed by zeros
    subsets = [c for size in range(most) for c in combinations(range(most), size)]
    choices = torch.tensor([[float(i in c) for i in range(most)] for c in subsets], dtype=here.dtype)
    choices = choices.to(here.device)
    many = 2.0 ** (here != 0).sum(-1)
    if float((bound[wrong] / here.abs().amax(-1).clamp_min(1e-300) * many).median()) > _CHANCE:
        return None
    partial_sums = here @ choices.T
    best = (partial_sums - got[wrong].unsqueeze(-1)).abs().argmin(-1)
    value = partial_sums.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    if bool(((value - got[wrong]).abs() > 4 * bound[wrong]).any()):
        return None
    whole = golden.clone()
    whole[wrong] = value
    left = torch.zeros_like(addends, dtype=torch.bool)
    left[wrong] = torch.zeros_like(left[wrong]).scatter(-1, first[wrong], choices[best].bool())
    cause, how, also = _read(addends != 0, left, wrong)
    change = with_result(lambda out, v=whole: v.reshape(out.shape))
    text = f"of the addends of {call.expression} {how}"
    return Change(cause, text, call.index, change, {}, 0.5, also=also, redone=changes)


def _read(there: Tensor, left: Tensor, wrong: Tensor) -> tuple[str, str, tuple[str, ...]]:
    """(cause, description, other causes) of the lost addends.

    An addend is identified by its own axis and all axes of the place but the last, along which it is scattered.
    """
    lost = there & ~left & wrong.unsqueeze(-1)
    come = there & (left | ~wrong.unsqueeze(-1))
    gone = lost.any(-2)  # at one of the addend's places
    if bool((gone & come.any(-2)).any()):
        return (
            "lost_update",
            "some are left in each element, not the same ones everywhere",
            ("overwritten_accumulator",),
        )
    return "missing_term", "some are lost", ("lost_update", "truncated_reduction")
