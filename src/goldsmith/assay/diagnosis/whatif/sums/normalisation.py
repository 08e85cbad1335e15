"""Exponentials that are not divided by their sum, or parts that each subtract their own maximum without rescaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, instead, with_arguments

_PARTS = (2, 3, 4, 5, 6, 7, 8)
_SOFTMAX, _SUM = ("_softmax", "_log_softmax"), "logsumexp"
_ONE = "each part subtracts its own maximum before exp, and the parts are joined without rescaling"


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    """exp(x - max(x)) in place of exp(x - logsumexp(x)), in the forward and where the backward recomputes it."""
    also = ("missing_rescale", "missing_term")
    if call.name == "_softmax":
        text, axis = f"the exponentials of {call.expression} are not divided by their sum", call.args[1]
        change = instead(lambda x, *a: torch.exp(x - x.amax(axis, keepdim=True)))
        yield Change("wrong_factor", text, call.index, change, {"factor": "the sum"}, 0.55, also=also)
    if call.name != "sub" or len(call.makers) != 2 or not isinstance(call.makers[1], int):
        return
    maker = calls[call.makers[1]] if 0 <= call.makers[1] < len(calls) else None
    if maker is None or maker.name != _SUM or call.args[1].numel() != maker.out.numel():
        return
    top = maker.args[0].amax(maker.args[1], keepdim=True)

    def undivided(args: tuple) -> tuple:
        return replaced(args, 1, args[0].amax(maker.args[1], keepdim=True).reshape(args[1].shape))

    if top.numel() == call.args[1].numel() and call.args[0].shape == maker.args[0].shape:
        text = f"the exponentials of {call.expression} are not divided by their sum, only by their largest"
        yield Change("wrong_factor", text, call.index, with_arguments(undivided), {"factor": "the sum"}, 0.6, also=also)


def by_parts(calls: Sequence[Node], among: set[int], numbers: Mapping[str, object]) -> Iterator[Change]:
    """Parts of equal length, as ranks or splits have them; the last may be shorter."""
    counts = [n for n in numbers.values() if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= 64]
    for call in calls:
        if call.index not in among or call.name not in (*_SOFTMAX, _SUM) or not floating(call.args[0]):
            continue
        axes = call.args[1] if call.name == _SUM else [call.args[1]]
        if len(axes) != 1 or not call.args[0].dim():
            continue
        axis = axes[0] % call.args[0].dim()
        n = call.args[0].shape[axis]
        blocks = {-(-n // parts): parts for parts in (*_PARTS, *counts) if parts < n}
        for block, parts in blocks.items():
            text = f"in {parts} parts of {call.expression}, {_ONE}"
            change = instead(_own_maxima(call.name, axis, block))
            yield Change("missing_rescale", text, call.index, change, {"block": block, "parts": parts}, 0.55,
                         also=("missing_partition",))  # fmt: skip


def _own_maxima(name: str, axis: int, block: int) -> Callable[..., Tensor]:
    def own_maximum(x: Tensor, dim: object, keepdim: bool = False, *rest: object) -> Tensor:
        parts = x.split(block, axis)
        each = torch.cat([torch.exp(p - p.amax(axis, keepdim=True)) for p in parts], axis).nan_to_num()
        if name == _SUM:
            return each.sum(axis, keepdim).log() + x.amax(axis, keepdim)
        total = each.sum(axis, keepdim=True)
        return each / total if name == "_softmax" else x - x.amax(axis, keepdim=True) - total.log()

    return own_maximum
