"""|r_i| <= W s (sqrt(2 ln m) + 4 + 8 / sqrt(K m)), r = (y - golden) / bound: errors against the ensemble's.

Errors are divided by the running bound before they are pooled, since rows of different scale hide one another. s is the
rms of the *noisiest* member (candidates may use that very order), or the element's own rms over the members where that
is larger, with the rounding of the store (ulp / sqrt 12) added in squares: eight members that happen to round to the
same number say nothing about the ninth.

Where the golden is 0 and so is every member (x - mean(x) of one element), there is no noise to measure with: honest
formulas that round there (x r - mean r) would err by any multiple of it. Such elements are `silent`: the bound alone
judges them, and no statistic is made of them.

W = 1.5 is measured: of 3,000 clean runs over random goldens, shapes, data, stores and orders none was beyond the limit
before any confirmation, and the farthest stood at 0.61 of it (0.92 with W = 1). A rate below 0.13 % at 95 %, squared by
the fresh seed that must repeat an alarm (`tests/assay/test_ladder_rates.py 3000`; torch 2.13, CPU).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..bounds.running_errors import Bounded, smallest_subnormal, unit_roundoff

WIDEN = 1.5
SHORT_LINE = 4  # elements that an axis must have: four are hardly near the golden all at once
SLOPE_Z = 6.0
BIAS_FLOOR = 1.0  # a bias counts only when it is larger than the noise itself
BIAS_UNITS = 8  # and larger than 8 u of the value: constants, exp and division of legal formulas are biased by a few u


@dataclass(frozen=True)
class Direction:
    """A pattern that errors are projected on, sum r d / sum d^2, with the standard error of honest runs there."""

    vector: Tensor
    power: float
    error: float


@dataclass
class Noise:
    """The ensemble's errors in units of the bound, computed once per reference and shared by every run judged by it."""

    bounded: Bounded
    store: torch.dtype
    members: list[Tensor]
    compute: torch.dtype = torch.float32

    @cached_property
    def least_slope(self) -> float:
        """Slopes below it are legal."""
        return BIAS_UNITS * unit_roundoff(self.compute)

    @cached_property
    def least_offset(self) -> float:
        """Mean errors below it (in units of the bound) are legal."""
        return self.least_slope * float(self.signal.abs().double().sum()) / max(self.count, 1)

    @cached_property
    def unit(self) -> Tensor:
        """What errors are divided by: the bound; where open, a store's rounding and the members' largest error.

        Members that share a rounded intermediate are one sample rather than eight: where its rounding happens to
        cancel, all of them are near the golden at once, and the next honest run is not. So no element is taken for
        quieter than its line: the open elements along an axis, and of the axes the quietest, so that rows and columns
        of different scale do not hide one another. Where no member errs on 0, it is the largest
        number's rounding.
        """
        bound, value = self.bounded.bound, self.bounded.value
        if not bool(self.bounded.open.any()):
            return bound
        spread = torch.zeros_like(bound)
        for member in self.members:
            spread = torch.maximum(spread, torch.nan_to_num((member.to(torch.float64) - value).abs(), torch.inf))
        spread = torch.maximum(spread, _of_line(spread, self.bounded.open))
        spread = spread + unit_roundoff(self.store) * value.abs()
        largest = torch.where(torch.isfinite(value), value.abs(), 0.0).max()
        nothing = spread == 0
        spread = torch.where(nothing, unit_roundoff(self.compute) * largest, spread + smallest_subnormal(self.store))
        return torch.where(self.bounded.open, spread, bound)

    @cached_property
    def silent(self) -> Tensor:
        """Elements at which golden and members are 0, up to what float64 itself rounds where they are not.

        Where the bound is open, there are none: the noise beside them is all that there is to judge them by.
        """
        own = 0.0 if self.compute == torch.float64 else unit_roundoff(torch.float64) / unit_roundoff(self.compute)
        least = torch.where(self.bounded.open, -1.0, own * self.bounded.bound)
        silent = self.bounded.value.abs() <= least
        for member in self.members if bool(silent.any()) else []:
            silent = silent & (member.to(torch.float64).abs() <= least)
        return silent

    @cached_property
    def judged(self) -> Tensor:
        """Elements that can be compared: finite golden, noise, and a unit neither 0 (those are exact) nor infinite."""
        return torch.isfinite(self.bounded.value) & torch.isfinite(self.unit) & (self.unit > 0) & ~self.silent

    @cached_property
    def count(self) -> int:
        return int(self.judged.sum())

    def relative(self, y: Tensor) -> Tensor:
        """(y - golden) / unit as float32, 0 where nothing is judged."""
        r = (y.to(torch.float64) - self.bounded.value) / self.unit
        return torch.where(self.judged, torch.nan_to_num(r, 0.0, 0.0, 0.0), 0.0).to(torch.float32)

    @cached_property
    def errors(self) -> Tensor:
        """(K, *shape)"""
        return torch.stack([self.relative(member) for member in self.members])

    @cached_property
    def signal(self) -> Tensor:
        """golden / unit: the direction in which a wrong scale moves the errors."""
        g = self.bounded.value / self.unit
        return torch.where(self.judged, torch.nan_to_num(g, 0.0, 0.0, 0.0), 0.0).to(torch.float32)

    @cached_property
    def along_signal(self) -> Direction | None:
        return self._direction(self.signal)

    @cached_property
    def along_ones(self) -> Direction | None:
        return self._direction(self.judged.to(torch.float32))

    def _direction(self, vector: Tensor) -> Direction | None:
        power = float(vector.double().square().sum())
        if not self.usable or power == 0:
            return None
        members = (self.errors.double() * vector).reshape(len(self.members), -1).sum(1) / power
        independent = float((vector.double() * self.scale).square().sum().sqrt()) / power
        return Direction(vector, power, max(float(members.square().mean().sqrt()), independent))

    @cached_property
    def quantum(self) -> Tensor:
        """Standard deviation of the store's own rounding in units of the bound."""
        ulp = 2 * unit_roundoff(self.store) * self.bounded.value.abs() + smallest_subnormal(self.store)
        return torch.where(self.judged, ulp / self.unit / math.sqrt(12), 0.0).to(torch.float32)

    @cached_property
    def rms(self) -> float:
        """Of the noisiest member."""
        if not self.members or self.count == 0:
            return 0.0
        squares = self.errors.reshape(len(self.members), -1).double().square().sum(1)
        return float((squares.max() / self.count).sqrt())

    @cached_property
    def largest(self) -> float:
        return float(self.errors.abs().max()) if self.members and self.count else 0.0

    @cached_property
    def scale(self) -> Tensor:
        """s of every element; squares of what float32 holds need not fit into it."""
        own = self.errors.double().square().mean(0)
        return (torch.clamp(own, min=self.rms**2) + self.quantum.double().square()).sqrt().to(torch.float32)

    def limit(self, m: int | None = None) -> float:
        """W (sqrt(2 ln m) + 4 + 8 / sqrt(K m))"""
        m = max(self.count if m is None else m, 1)
        return WIDEN * (math.sqrt(2 * math.log(m)) + 4 + 8 / math.sqrt(max(len(self.members), 1) * m))

    @cached_property
    def usable(self) -> bool:
        return bool(self.members) and self.count > 0

    def excess(self, r: Tensor) -> Tensor:
        """|r| / s: how many times the noise each error is."""
        return torch.where(self.judged, r.abs() / self.scale.clamp(min=1e-30), 0.0)


def _of_line(spread: Tensor, use: Tensor) -> Tensor:
    """The least of the rms of `spread` over the elements in `use` along each axis that is long enough."""
    least = min(SHORT_LINE, max(spread.shape, default=0))
    square = torch.where(use & torch.isfinite(spread), spread, 0.0).square()
    number = (use & torch.isfinite(spread)).to(torch.float64)
    found = torch.full_like(spread, torch.inf)
    for axis, length in enumerate(spread.shape):
        if length >= least > 1:
            line = (square.sum(axis, keepdim=True) / number.sum(axis, keepdim=True).clamp(min=1.0)).sqrt()
            found = torch.minimum(found, line)
    return torch.where(torch.isfinite(found), found, 0.0)


def ulps(y: Tensor, golden: Tensor, store: torch.dtype) -> Tensor:
    """|y - round(golden)| in units of the last place of the store, finite elements only, flat."""
    g = golden.to(store).to(torch.float64)
    keep = torch.isfinite(g) & torch.isfinite(y)
    g, y = g[keep], y[keep]
    _, exponent = torch.frexp(g)
    ulp = torch.ldexp(torch.full_like(g, 2 * unit_roundoff(store)), exponent - 1)
    return (y - g).abs() / ulp.clamp(min=smallest_subnormal(store))


def quantile(x: Tensor, q: float) -> float:
    """The smallest element with at least a share q at or below it."""
    if x.numel() == 0:
        return 0.0
    return float(x.kthvalue(max(1, math.ceil(q * x.numel()))).values)
