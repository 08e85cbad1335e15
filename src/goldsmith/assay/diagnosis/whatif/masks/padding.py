"""Lanes beyond a row's end that enter a reduction: they are loaded as 0, but later operators make them nonzero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...edits.primitives.spans import BLOCKS
from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, with_result

_ON_ELEMENTS = frozenset(
    """add sub rsub mul div pow square abs neg exp sigmoid tanh silu gelu relu sqrt rsqrt log softplus sin cos
    clamp clamp_min clamp_max maximum minimum""".split()
)
_DEPTH = 8  # operators between the load and the sum


def changes(calls: Sequence[Node]) -> Iterator[Change]:
    """Sums and means over n to which each lane up to a block's end adds the value computed from 0."""
    for call in calls:
        if call.name not in ("sum", "mean") or not call.args or not floating(call.args[0]):
            continue
        axes = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], list | tuple) else ()
        if len(axes) != 1 or call.args[0].dim() == 0:
            continue
        axis, n = axes[0] % call.args[0].dim(), call.args[0].shape[axes[0]]
        try:
            lane = _of_zero(calls, call.makers[0], call.args[0], axis - call.args[0].dim(), _DEPTH) if n > 1 else None
        except RuntimeError:  # a view lies between, so the axes differ
            continue
        if lane is None or not bool(torch.isfinite(lane).all()) or not bool(lane.any()):
            continue
        keep = len(call.args) > 2 and bool(call.args[2])
        lane = lane if keep else lane.squeeze(axis)
        for width in sorted({1 << (n - 1).bit_length(), *(n + -n % block for block in BLOCKS)} - {n}):
            added = lane * (width - n) / (n if call.name == "mean" else 1)
            text = f"{width - n} lanes beyond the end of {n} enter {call.expression}, and are not 0 there"
            params = {"axis": axis, "padded": width}
            yield Change("wrong_mask", text, call.index, with_result(lambda out, a=added: out + a), params, 0.6)


def _of_zero(calls: Sequence[Node], key: object, value: Tensor, axis: int, depth: int) -> Tensor | None:
    """The value at a lane of zeros, of size 1 along that axis (counted from the end); None if it is not known."""
    if value.dim() < -axis or value.shape[axis] == 1:
        return value  # the same for all lanes
    maker = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
    loaded = torch.zeros_like(value.narrow(axis, 0, 1))
    if maker is None or depth == 0 or maker.name not in _ON_ELEMENTS or maker.func is None:
        return loaded
    keys, args = iter(maker.makers), []
    for a in maker.args:
        if not isinstance(a, Tensor):
            args.append(a)
            continue
        args.append(_of_zero(calls, next(keys), a, axis, depth - 1))
    return maker.func(*args, **maker.kwargs)
