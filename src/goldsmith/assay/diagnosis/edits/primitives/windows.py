"""The primitives of windows along an axis, and of their taps."""

from __future__ import annotations

import torch
from torch import Tensor

from ..golden_edit import OperatorCall


def slide(x: Tensor, *, axis: int, step: int) -> Tensor:
    """Position i shows position i + step; zeros beyond the end."""
    out = x.roll(-step, axis)
    out.select(axis, -1 if step > 0 else 0).zero_()
    return out


def zero_place(x: Tensor, *, axis: int, at: int) -> Tensor:
    out = x.clone()
    if x.shape[axis]:
        out.select(axis, at).zero_()
    return out


def slide_taps(call: OperatorCall, *, axis: int, first: int, last: int, step: int, around: bool) -> Tensor:
    """Windows in which each tap's own places in [first, last) move on by one; its padding stays."""
    out = call.on(*call.args).clone()
    for j in range(call.args[2]):
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


def store_taps(call: OperatorCall, *, last: bool) -> Tensor:
    """The gradient of windows, stored instead of added: of several taps at a place the last, or the first, is left."""
    grad, sizes, dim, size, by = call.args[:5]
    out = grad.new_zeros(list(sizes))
    dim %= out.dim()
    for j in range(size) if last else reversed(range(size)):
        out.index_copy_(dim, torch.arange(grad.shape[dim], device=grad.device) * by + j, grad.select(-1, j))
    return out
