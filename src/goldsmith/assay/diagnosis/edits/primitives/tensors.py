"""The primitives that edit one operand or result: drop, scale, restrict, extend, permute, replace.

Each is a function of the tensor and of its settings. Rules such as spans hold for every length, so that one edit fits
all turns of a loop and all draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spans import Span


def constant(value: object, *, new: object) -> object:
    return list(new) if isinstance(new, tuple) else new


def read_other(x: Tensor, other: Tensor) -> Tensor:
    """Another tensor of the run."""
    return other if other.shape == x.shape else other.reshape(x.shape)


def replace_by(x: Tensor, *, new: Tensor) -> Tensor:
    return new.reshape(x.shape).clone()


def scale(x: Tensor, *, c: float) -> Tensor:
    return x * c


def multiply(x: Tensor, by: Tensor, *, inverse: bool) -> Tensor:
    """x multiplied or divided by another tensor of the run, which may have its size in another shape."""
    by = by.reshape(x.shape) if by.numel() == x.numel() else by
    return x * (1 / by if inverse else by)


def transpose(x: Tensor) -> Tensor:
    return x.mT


def read_across(x: Tensor) -> Tensor:
    """x[i, j] read at offset i + j * columns of the flat memory; NaN beyond its end, where anything may lie."""
    rows, columns = x.shape[-2:]
    at = torch.arange(rows, device=x.device)[:, None] + torch.arange(columns, device=x.device) * columns
    first = torch.arange(x.numel() // (rows * columns), device=x.device) * (rows * columns)
    place = first.reshape(*x.shape[:-2], 1, 1) + at
    return x.flatten()[place.clamp(max=x.numel() - 1)].masked_fill(place >= x.numel(), torch.nan)


def exchange_strides(x: Tensor) -> Tensor:
    return x.mT.reshape(x.shape)


def read_as_transposed(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-2], x.shape[-1], x.shape[-2]).mT


# how a matrix may be read with wrong strides
STRIDES = (
    ("the strides of {} stand in each other's place", read_across),
    ("the strides of {} are exchanged", exchange_strides),
    ("{} is read as if its axes were exchanged", read_as_transposed),
)


def restrict(x: Tensor, *, axis: int, span: Span, fill: float = 0.0) -> Tensor:
    """x with the neutral element outside the span."""
    lo, hi = span.of(x.shape[axis])
    out = torch.full_like(x, fill)
    out.narrow(axis, lo, hi - lo).copy_(x.narrow(axis, lo, hi - lo))
    return out


def repeat_last(x: Tensor, *, axis: int, block: int) -> Tensor:
    """The axis filled up to whole blocks with its last element."""
    n = x.shape[axis]
    shape = [-n % block if d == axis else s for d, s in enumerate(x.shape)]
    return torch.cat([x, x.narrow(axis, n - 1, 1).expand(shape)], axis)


def restrict_blocks(x: Tensor, *, size: int, reach: int) -> Tensor:
    """A square matrix without its blocks of `size` that are more than `reach` blocks off the diagonal."""
    place = torch.arange(x.shape[-1], device=x.device)
    return x * ((place[:, None] // size - place // size).abs() <= reach)
