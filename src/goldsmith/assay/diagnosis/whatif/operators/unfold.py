"""Windows over a padded axis, as `unfold` makes them: shifted by one place, or gradients stored instead of added.

window   w[t, j] = x[step t + j]
kernel   a loop over j: each tap reads its own unpadded rows, and adds to them in the backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, instead, with_arguments

_ALSO = ("mask_shift", "off_by_one")
_TAPS = 64


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name == "unfold" and floating(call.args[0]) and 1 < call.args[2] <= _TAPS:
        yield from _windows(call, calls)
    elif call.name == "unfold_backward" and floating(call.args[0]) and 1 < call.args[3] <= _TAPS:
        yield from _gradients(call)
    elif call.name == "convolution" and floating(call.args[0]) and not call.args[6]:
        yield from _convolved(call)


# forward


def _windows(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    x, axis = call.args[0], call.args[1] % call.args[0].dim()
    before, behind = _padding(call, calls, axis)
    for step, way in ((1, "after it"), (-1, "before it")):
        params = {"axis": axis, "step": step}
        text = f"every window of {call.expression} reads the positions {way}"
        moved = with_arguments(lambda args, s=step: replaced(args, 0, _slid(args[0], s, axis)))
        yield Change("shifted", text, call.index, moved, params, 0.5, also=_ALSO)
        for around, how in ((True, "wrapping around"), (False, "its own at the end")):
            if call.args[3] == 1:
                taps = partial(_tapped, axis=axis, first=before, last=x.shape[axis] - behind, step=step, around=around)
                text = f"every tap of {call.expression} reads the positions {way}, {how}; its padding stays"
                yield Change("shifted", text, call.index, instead(taps), params, 0.45, also=_ALSO)


def _slid(x: Tensor, step: int, axis: int) -> Tensor:
    """x shifted by `step` places; zeros beyond its end."""
    out = x.roll(-step, axis)
    out.select(axis, -1 if step > 0 else 0).zero_()
    return out


def _padding(call: Node, calls: Sequence[Node], axis: int) -> tuple[int, int]:
    """Numbers of padding places before and after the input."""
    x, key = call.args[0], call.makers[0]
    maker = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
    if maker is None or not isinstance(maker.out, Tensor) or maker.out.shape != x.shape:
        return 0, 0
    if maker.name == "constant_pad_nd":
        pads = list(maker.args[1])[2 * (x.dim() - 1 - axis) :][:2]
        return (max(pads[0], 0), max(pads[1], 0)) if len(pads) == 2 else (0, 0)
    if maker.name == "cat" and (maker.args[1] if len(maker.args) > 1 else 0) % x.dim() == axis:
        parts = [(t.shape[axis], not bool(t.any())) for t in maker.args[0] if t.numel()]
        ends = [n if empty else 0 for n, empty in (parts[0], parts[-1])] if len(parts) > 1 else [0, 0]
        return ends[0], ends[1]
    return 0, 0


def _tapped(
    x: Tensor, dim: int, size: int, by: int, *, axis: int, first: int, last: int, step: int, around: bool
) -> Tensor:
    """Windows in which each tap's own places in [first, last) move on by one; its padding stays."""
    out = x.unfold(dim, size, by).clone()
    for j in range(size):
        tap = out.select(-1, j)
        lo, hi = max(first - j, 0), min(last - j, tap.shape[axis])
        if hi - lo < 2:
            continue
        part = tap.narrow(axis, lo, hi - lo)
        new = part.roll(-step, axis)
        if not around:
            end = -1 if step > 0 else 0
            new.select(axis, end).copy_(part.select(axis, end))
        part.copy_(new)
    return out


def _convolved(call: Node) -> Iterator[Change]:
    """The operator on an input with one more place, without the first or the last result."""
    x, strides = call.args[0], list(call.args[3])
    for axis in range(2, x.dim()):
        if strides[(axis - 2) % len(strides)] != 1 or call.args[1].shape[axis] < 2:
            continue
        place = x.dim() - 1 - axis
        for step, way in ((1, "after it"), (-1, "before it")):

            def run(x: Tensor, *args: object, place: int = place, axis: int = axis, step: int = step,
                    func: Callable[..., Tensor] = call.func) -> Tensor:  # fmt: skip
                pads = [0] * (2 * place) + ([0, 1] if step > 0 else [1, 0])
                out = func(F.pad(x, pads), *args)
                return out.narrow(axis, 1 if step > 0 else 0, out.shape[axis] - 1)

            text = f"every window of {call.expression} reads the positions {way} along axis {axis}"
            yield Change("shifted", text, call.index, instead(run), {"axis": axis, "step": step}, 0.5, also=_ALSO)


# backward


def _gradients(call: Node) -> Iterator[Change]:
    size = call.args[3]
    for last, which in ((True, "last"), (False, "first")):
        text = f"{call.expression} stores where it should add: of the taps that reach a position the {which} is left"
        also = ("lost_update", "missing_term")
        yield Change("overwritten_accumulator", text, call.index, instead(partial(_stored, last=last)),
                     {"left": which}, 0.7, also=also)  # fmt: skip
    for at, which in ((size - 1, "last"), (0, "first")):
        text = f"{call.expression} leaves out the {which} tap"
        without = with_arguments(lambda args, at=at: replaced(args, 0, _without(args[0], at)))
        yield Change("off_by_one", text, call.index, without, {"tap": at}, 0.65, also=("truncated_reduction",))
    yield Change("permuted", f"{call.expression} takes the taps in reverse order", call.index,
                 with_arguments(lambda args: replaced(args, 0, args[0].flip(-1))), {}, 0.6)  # fmt: skip
    for step, way in ((1, "after it"), (-1, "before it")):
        text = f"{call.expression} gives every position the gradient of the one {way}"
        slid = instead(lambda *args, s=step, f=call.func: _slid(f(*args), s, args[2]))
        yield Change("shifted", text, call.index, slid, {"step": step}, 0.5, also=_ALSO)


def _stored(grad: Tensor, sizes: Sequence[int], dim: int, size: int, by: int, *, last: bool) -> Tensor:
    out = grad.new_zeros(list(sizes))
    dim %= out.dim()
    for j in range(size) if last else reversed(range(size)):
        at = torch.arange(grad.shape[dim], device=grad.device) * by + j
        out.index_copy_(dim, at, grad.select(-1, j))
    return out


def _without(grad: Tensor, tap: int) -> Tensor:
    out = grad.clone()
    out.select(-1, tap).zero_()
    return out
