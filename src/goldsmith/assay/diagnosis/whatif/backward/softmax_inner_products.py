"""Mistakes before a softmax's backward that leave its inner product right, because kernels compute it elsewhere.

Flash attention kernels take the inner product from the output, and losses know the sum of a label's shares; autograd
computes it from the incoming gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ..change import Change, instead

_MOST = 300
_RARER = 0.03
_NORMS = frozenset(("_softmax_backward_data", "_log_softmax_backward_data"))


def changes(calls: Sequence[Node], among: set[int], backward_changes: Iterable[Change]) -> Iterator[Change]:
    """`backward_changes`: changes of the backward; those before a softmax's backward are offered with its old sum."""
    norms = [c for c in calls if c.backward and c.index in among and c.name in _NORMS]
    before: set[int] = set()
    for call in norms:
        before |= _before(calls, call)
    kept = tuple((c.index, _with_sum(c)) for c in norms)
    count = 0
    for change in backward_changes:
        at = [i for i, _ in change.all]
        if not at or change.saved is not None or change.leaves is not None or not before.issuperset(at):
            continue
        count += 1
        if count > _MOST:
            return
        group = change.group or ((change.at, change.change),)
        more: tuple[tuple[int, Any], ...] = kept
        if change.free is not None:
            more = tuple((i, lambda number, f=f: f) for i, f in kept)
        text = f"{change.text}, with the old sum of the softmax's backward,"
        text = text if change.free is not None else text[:-1]
        yield replace(change, text=text, group=(*group, *more), prior=change.prior - _RARER, edit=None)


def _before(calls: Sequence[Node], call: Node) -> set[int]:
    """The backward operators that its gradient depends on."""
    operators: set[int] = set()
    waiting = [call.makers[0]]
    while waiting:
        key = waiting.pop()
        if isinstance(key, int) and 0 <= key < len(calls) and key not in operators and calls[key].backward:
            operators.add(key)
            waiting += calls[key].read
    return operators


def _with_sum(call: Node) -> Changed:
    g, y, axis = call.args[0], call.args[1], call.args[2]
    total = (g.sum(axis, keepdim=True) if call.name.startswith("_log") else (g * y).sum(axis, keepdim=True)).detach()

    def gradient(g: Tensor, y: Tensor, *args: Any) -> Tensor:
        return g - torch.exp(y) * total if call.name.startswith("_log") else y * (g - total)

    return instead(gradient)
