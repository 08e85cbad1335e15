"""|r_i| <= W s (sqrt(2 ln m) + 4 + 8 / sqrt(K m)), r = (y - golden) / bound: errors against the ensemble's.

Errors are divided by the running bound before pooling, because rows of different scale would hide one another. s is
the rms of the *noisiest* member (a candidate may use that very order), or the element's rms over the members if that
is larger. The rounding of the store (ulp / sqrt 12) is added in squares: eight members that happen to round to the
same number say nothing about a ninth.

Where the golden and every member are 0 (x - mean(x) of one element) there is no noise: an honest formula that rounds
there (x r - mean r) would err by any multiple of it. The bound alone judges such `silent` elements, and they enter no
statistic.

W = 1.5 is measured: none of 3,000 clean runs over random goldens, shapes, data, stores and orders exceeded the limit
before confirmation, and the worst reached 0.61 of it (0.92 with W = 1). The false alarm rate is below 0.13 % at 95 %
confidence, and squared because a fresh seed must repeat an alarm (`tests/assay/test_ladder_rates.py 3000`; torch 2.13,
CPU).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..bounds.bounded import Bounded, smallest_subnormal, unit_roundoff

WIDEN = 1.5
SHORT_LINE = 4  # least length of an axis: four elements are rarely all near the golden at once
SLOPE_Z = 6.0
BIAS_FLOOR = 1.0  # a bias counts only if it exceeds the noise itself
BIAS_UNITS = 8  # and 8 u of the value: constants, exp and division in legal formulas are biased by a few u


@dataclass(frozen=True)
class Direction:
    """A vector d on which errors are projected, sum r d / sum d^2, with the standard error of honest runs."""

    vector: Tensor
    power: float
    error: float


@dataclass
class Noise:
    """The ensemble's errors in units of the bound, computed once per golden result and shared by all its runs."""

    bounded: Bounded
    store: torch.dtype
    members: list[Tensor]
    compute: torch.dtype = torch.float32

    @cached_property
    def least_slope(self) -> float:
        """Smaller slopes are legal."""
        return BIAS_UNITS * unit_roundoff(self.compute)

    @cached_property
    def least_offset(self) -> float:
        """Smaller mean errors, in units of the bound, are legal."""
        return self.least_slope * float(self.signal.abs().double().sum()) / max(self.count, 1)

    @cached_property
    def unit(self) -> Tensor:
        """The divisor of errors: the bound; where open, the rounding of the store plus the members' largest error.

        Members that share a rounded intermediate are one sample, not eight: where its rounding happens to cancel, all
        of them are near the golden and the next honest run is not. So no element counts as quieter than its line: the
        rms of the open elements along the quietest axis, so that rows and columns of different scale do not hide one
        another. Where no member errs on 0, the divisor is the rounding of the largest number.
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
        """Elements at which golden and members are 0 up to a rounding of float64.

        None where the bound is open: there the noise of their neighbours is the only measure.
        """
        own = 0.0 if self.compute == torch.float64 else unit_roundoff(torch.float64) / unit_roundoff(self.compute)
        least = torch.where(self.bounded.open, -1.0, own * self.bounded.bound)
        silent = self.bounded.value.abs() <= least
        for member in self.members if bool(silent.any()) else []:
            silent = silent & (member.to(torch.float64).abs() <= least)
        return silent

    @cached_property
    def judged(self) -> Tensor:
        """Elements that can be compared: a finite golden, and a unit that is finite and not 0 (those are exact)."""
        return torch.isfinite(self.bounded.value) & torch.isfinite(self.unit) & (self.unit > 0) & ~self.silent

    @cached_property
    def count(self) -> int:
        return int(self.judged.sum())

    def relative(self, y: Tensor) -> Tensor:
        """(y - golden) / unit as float32, 0 at elements that are not judged"""
        r = (y.to(torch.float64) - self.bounded.value) / self.unit
        return torch.where(self.judged, torch.nan_to_num(r, 0.0, 0.0, 0.0), 0.0).to(torch.float32)

    @cached_property
    def errors(self) -> Tensor:
        """Relative errors of the members, (K, *shape)."""
        return torch.stack([self.relative(member) for member in self.members])

    @cached_property
    def signal(self) -> Tensor:
        """golden / unit: the direction of the errors that a wrong scale causes"""
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
        """Standard deviation of the rounding of the store, in units of the bound."""
        ulp = 2 * unit_roundoff(self.store) * self.bounded.value.abs() + smallest_subnormal(self.store)
        return torch.where(self.judged, ulp / self.unit / math.sqrt(12), 0.0).to(torch.float32)

    @cached_property
    def rms(self) -> float:
        """Rms error of the noisiest member."""
        if not self.members or self.count == 0:
            return 0.0
        squares = self.errors.reshape(len(self.members), -1).double().square().sum(1)
        return float((squares.max() / self.count).sqrt())

    @cached_property
    def largest(self) -> float:
        return float(self.errors.abs().max()) if self.members and self.count else 0.0

    @cached_property
    def scale(self) -> Tensor:
        """s of every element, squared in float64 because squares may overflow float32."""
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
    """The smallest rms of `spread` over the elements in `use`, among the axes that are long enough."""
    least = min(SHORT_LINE, max(spread.shape, default=0))
    square = torch.where(use & torch.isfinite(spread), spread, 0.0).square()
    number = (use & torch.isfinite(spread)).to(torch.float64)
    quietest = torch.full_like(spread, torch.inf)
    for axis, length in enumerate(spread.shape):
        if length >= least > 1:
            line = (square.sum(axis, keepdim=True) / number.sum(axis, keepdim=True).clamp(min=1.0)).sqrt()
            quietest = torch.minimum(quietest, line)
    return torch.where(torch.isfinite(quietest), quietest, 0.0)


def ulps(y: Tensor, golden: Tensor, store: torch.dtype) -> Tensor:
    """|y - round(golden)| in units of the last place of the store, finite elements only, flat."""
    g = golden.to(store).to(torch.float64)
    keep = torch.isfinite(g) & torch.isfinite(y)
    g, y = g[keep], y[keep]
    _, exponent = torch.frexp(g)
    ulp = torch.ldexp(torch.full_like(g, 2 * unit_roundoff(store)), exponent - 1)
    return (y - g).abs() / ulp.clamp(min=smallest_subnormal(store))


def quantiles(x: Tensor, shares: Sequence[float]) -> list[float]:
    """For each share q the smallest element such that at least q of all elements are not larger."""
    if x.numel() == 0:
        return [0.0 for _ in shares]
    ranks = [max(1, math.ceil(q * x.numel())) for q in shares]
    if x.is_cuda:  # there one kthvalue takes 4 ms (one block of threads), and a sort serves all shares
        ascending = x.sort().values
        return ascending[[rank - 1 for rank in ranks]].tolist()
    return [float(x.kthvalue(rank).values) for rank in ranks]
