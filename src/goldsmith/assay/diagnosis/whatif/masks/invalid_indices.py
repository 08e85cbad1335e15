"""Indices that stand for nothing, such as -1: the golden reads another place for them and masks the result.

A kernel that does neither reads or writes where the number points: from the end, or beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import whole
from ..change import Change, instead, with_result

_ASKS = {"ge": ">=", "gt": ">", "lt": "<", "le": "<=", "ne": "!=", "eq": "=="}
_LIMITS = ("clamp", "clamp_min", "clamp_max")
_WRAPS = (("around", "count from the end"), ("clamp", "use the nearest valid one"))


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    for call in calls:
        if call.backward or call.index not in among or call.name not in _ASKS or len(call.tensors) != 1:
            continue
        replaced = [(c.index, _unreplaced(c)) for c in calls if c.index in among and _replaces(c, call)]
        valid = call.out.double().mean() if call.out.numel() else 1.0
        if not replaced or not 0 < float(valid) < 1:
            continue
        keeps = call.name != "eq" if call.args[1] in (-1, 0) else float(valid) > 0.5
        for wrap, where in _WRAPS:
            condition = f"{call.operand(0) or 'an index'} {_ASKS[call.name]} {call.args[1]}"
            text = f"nothing checks whether {condition}: invalid indices {where}"
            always = with_result(lambda m, keeps=keeps: torch.full_like(m, keeps))
            group = ((call.index, always), *replaced)
            params = {"index": call.operand(0)}
            yield Change("invalid_index", text, call.index, always, params, 0.66, wrap=wrap, group=group,
                         also=("wrong_mask",))  # fmt: skip


def _replaces(call: Node, condition: Node) -> bool:
    """Whether it replaces the indices that the condition is about."""
    at = 1 if call.name == "where" else 0
    if call.name not in (*_LIMITS, "where", "masked_fill") or len(call.args) <= at or not whole(call.args[at]):
        return False
    own = sum(isinstance(a, Tensor) for a in call.args[:at])
    same = call.makers[own] == condition.makers[0] and call.args[at].shape == call.out.shape
    return same and not torch.equal(call.args[at], call.out)


def _unreplaced(call: Node) -> Changed:
    at = 1 if call.name == "where" else 0
    return instead(lambda *args, at=at, **kwargs: args[at].clone())
