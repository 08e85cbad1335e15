"""Limit for the rounding of an equivalent formula, where the golden's own formula rounds less.

    limit = 4 sqrt(n) u max(|g| over the lines through an element, |dy y| / |x|), n the longest axis

with |dy y| / min(1, |x|) where g is 0, or next to it: below 4 sqrt(n) u of that, or below the dtype's normal numbers.

A running bound holds for the golden's formula. An equally stable formula errs by a few u of its summands, not of their
sum. Examples: decays exp(c[i] - c[j]) of a cumulative sum c, whose gradient at the first element is the difference of
two equal sums; a transform over a whole axis. The largest number on the lines through an element estimates those
summands. For a gradient x.grad they have the size of dy y in units of x: a smaller error changes no loss. An exact zero
may be the difference of two sums that do not shrink where x grows, as those of log decays do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..bounds.bounded import Bounded, unit_roundoff

ROUNDINGS = 4.0  # sums of n terms of random sign err by some sqrt(n) u of their size
NEXT_TO_NOTHING = 2.0**-3  # of such sums: only the bounds judge larger elements


def unit(values: Tensor, compute: torch.dtype) -> float:
    """4 sqrt(n) u"""
    return ROUNDINGS * math.sqrt(max(values.shape, default=1) or 1) * unit_roundoff(compute)


def lost(values: Tensor, compute: torch.dtype, terms: Terms) -> float:
    """Where any formula is right, smaller results are as good as 0."""
    return max(unit(values, compute) * terms.of_zeros, torch.finfo(compute).smallest_normal)


class Terms(NamedTuple):
    """Sizes of summands that may cancel in a gradient; `of_zeros`: in an exact zero."""

    usual: float = 0.0
    of_zeros: float = 0.0


NO_TERMS = Terms()


def terms(name: str, bounded: Mapping[str, Bounded], leaves: Mapping[str, Tensor]) -> Terms:
    """max |dy y| / max |x| of a gradient x.grad, over the outputs y that round; 0 for other results"""
    x = leaves.get(name.removesuffix(".grad")) if name.endswith(".grad") else None
    if x is None or not x.numel():
        return Terms()
    sizes = [0.0]
    for output, y in bounded.items():
        dy = leaves.get(f"grad_{output}")
        if dy is not None and dy.shape == y.value.shape and dy.numel():
            sizes.append(float(torch.where(y.bound > 0, (dy * y.value).abs(), 0.0).nan_to_num(0.0, 0.0, 0.0).max()))
    largest = float(x.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return Terms(max(sizes) / largest, max(sizes) / min(1.0, largest)) if largest > 0 else Terms()


def hint(
    bounded: Bounded, error: Tensor, compute: torch.dtype, neighbours: Iterable[Tensor], least: float = 0.0
) -> str:
    """A sentence if the error is at most a rounding of neighbouring numbers; else "".

    Neighbours are the result's elements on the lines through an element, and the same elements of tensors of its shape
    (`neighbours`). least: the value of `terms`.
    """
    wrong = torch.isfinite(bounded.value) & (error > bounded.bound)
    if not bool(torch.isfinite(error).all()) or not bool(wrong.any()):
        return ""
    size = bounded.value.abs().nan_to_num(0.0, 0.0, 0.0)
    lines = [size.amax(a, keepdim=True).expand_as(size) for a in range(size.dim())]
    alike = [t.double().abs() for t in neighbours if t.shape == size.shape and t.is_floating_point()]
    size = torch.stack([size, *lines, *alike]).amax(0).clamp(min=least)
    roundings = float((error / (unit_roundoff(compute) * size))[wrong].max())
    if not roundings <= unit(bounded.value, compute) / unit_roundoff(compute):
        return ""
    return (
        f"; the error is at most {roundings:.2g} roundings of the numbers beside it, as for another formula that adds "
        "up numbers of their size (x - logsigmoid(x) for softplus(x), a Fourier transform for a short sum): if that "
        "formula is intended, write the golden with it"
    )


def limit(bounded: Bounded, compute: torch.dtype, terms: Terms = NO_TERMS, *, everywhere: bool = False) -> Tensor:
    """The error that an equal formula may make, where the golden is 0 or tiny, compared with its neighbours; else 0.

    everywhere: also where the golden is neither, because any formula is right.

    A golden that does not round (a copy) has no such formula: its zeros are exact. A row that is small as a whole is
    judged by its own size. terms: the size of the summands that may cancel, if it is known.
    """
    size = torch.where(torch.isfinite(bounded.value), bounded.value.abs(), 0.0)
    rounded = size.where(bounded.bound > 0, 0.0)
    lines = [rounded.amax(a, keepdim=True).expand_as(size) for a in range(size.dim()) if size.shape[a] > 1]
    peaks = torch.stack(lines or [rounded])
    largest, least = peaks.amax(0).clamp(min=terms.of_zeros), peaks.amin(0).clamp(min=terms.usual)
    remains = (everywhere & (bounded.bound > 0)) | (size <= NEXT_TO_NOTHING * least)
    zeros = bounded.structural_zero | (everywhere & (size < lost(size, compute, terms)))
    summands = torch.where(zeros, largest, least.where(remains, 0.0))
    return (unit(size, compute) * summands).where(torch.isfinite(bounded.value) & ~bounded.open, 0.0)
