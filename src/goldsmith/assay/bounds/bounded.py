"""Bounded: a float64 value with a proven bound on its error; and the units of rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# allows for second-order terms that the rules omit: |y - value| > SLACK * bound exceeds every rounding of the golden's
# own formula, in any order of its sums (another formula may round more)
SLACK = 1.02


@dataclass
class Bounded:
    """A float64 value with |y - value| <= bound for every legal y stored in the result's dtype.

    bound: inf where the bound is open (ill-conditioned, or an operator without a rule is on the path).
    structural_zero: a 0 that no rounding can change, so that any nonzero is wrong.
    notes: operators without a rule that this result depends on, e.g. "aten.cdist".
    """

    value: Tensor
    bound: Tensor
    structural_zero: Tensor
    notes: list[str]

    @property
    def open(self) -> Tensor:
        return torch.isinf(self.bound)


def unproven(value: Tensor, why: str) -> Bounded:
    """A value with an open bound; `why` becomes its note."""
    value = value.to(torch.float64, copy=True)
    return Bounded(value, torch.full_like(value, torch.inf), torch.zeros_like(value, dtype=torch.bool), [why])


def unit_roundoff(dtype: torch.dtype) -> float:
    """u = 2^-8 bfloat16, 2^-11 float16, 2^-24 float32, 2^-53 float64; 0 for integers and bool."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def smallest_subnormal(dtype: torch.dtype) -> float:
    """2^-149 for float32, 2^-133 for bfloat16, 2^-24 for float16; 0 for integers and bool."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
