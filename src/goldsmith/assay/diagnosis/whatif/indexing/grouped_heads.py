"""Places that are shared by a group, taken in turn instead of by group, or the reverse: h // r against h % r."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ..change import Change, instead

_ALSO = ("wrong_stride", "invalid_index")


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    """Changes of repeating copies, and of repeat_interleave: heads that share keys, groups of experts."""
    x = call.args[0] if call.args else None
    if not isinstance(x, Tensor) or not x.numel():
        return
    if call.name == "clone":
        for axis in range(1, x.dim()):
            if x.stride(axis) == 0 and x.shape[axis] > 1 and x.shape[axis - 1] > 1 and x.stride(axis - 1):
                yield _in_turn(call, axis)
    elif call.name == "repeat" and len(call.args[1]) == x.dim():
        for axis, times in enumerate(call.args[1]):
            if times > 1 and x.shape[axis] > 1:
                yield _in_groups(call, axis, times)


def _in_turn(call: Node, axis: int) -> Change:
    groups, each = call.args[0].shape[axis - 1 : axis + 1]

    def make(x: Tensor, **kwargs: Any) -> Tensor:
        one = x.select(axis, 0)
        place = torch.arange(groups * each, device=x.device) % groups
        return one.index_select(axis - 1, place).unflatten(axis - 1, (groups, each)).contiguous()

    name = call.operand(0) or "what is repeated"
    text = f"{name} is taken in turn, h % {groups} of axis {axis - 1}, and not by groups, h // {each}"
    params = {"operand": name, "axis": axis - 1}
    return Change("permuted", text, call.index, instead(make), params, 0.6, also=_ALSO)


def _in_groups(call: Node, axis: int, times: int) -> Change:
    def make(x: Tensor, repeats: Sequence[int], **kwargs: Any) -> Tensor:
        others = [1 if d == axis else n for d, n in enumerate(repeats)]
        return x.repeat_interleave(times, axis).repeat(others)

    name = call.operand(0) or "what is repeated"
    text = f"{name} is taken by groups, h // {times} of axis {axis}, and not in turn, h % {call.args[0].shape[axis]}"
    params = {"operand": name, "axis": axis}
    return Change("permuted", text, call.index, instead(make), params, 0.6, also=_ALSO)
