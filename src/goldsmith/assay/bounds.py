"""|computed - exact| <= e: running error analysis of a golden, forward and backward (stub)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Bounded:
    """A float64 value with |y - value| <= bound for every legal y stored in the result's dtype.

    bound: inf where the bound is open (ill-conditioned there, or an operator without a rule was on the path).
    structural_zero: value 0 that no rounding can disturb; any nonzero is wrong.
    notes: operators without a rule that this result depends on, e.g. "aten.cdist".
    """

    value: Tensor
    bound: Tensor
    structural_zero: Tensor
    notes: list[str]

    @property
    def open(self) -> Tensor:
        return torch.isinf(self.bound)


def unit_roundoff(dtype: torch.dtype) -> float:
    """u = 2^-8 bfloat16, 2^-11 float16, 2^-24 float32, 2^-53 float64; 0 for integers and bool."""
    return 0.0 if not dtype.is_floating_point else torch.finfo(dtype).eps / 2


def running_bounds(
    fn: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    leaves: Mapping[str, Tensor],
    *,
    compute: torch.dtype,
    stores: Mapping[str, torch.dtype],
    dot: str = "ieee",
) -> dict[str, Bounded]:
    """Every result of `fn(leaves)` with a proven rounding bound; `fn` may call torch.autograd.grad inside.

    leaves: float64 tensors holding the candidate's already rounded inputs (exact: error 0), and output gradients.
    stores: result name -> dtype in which the candidate stores it (default: `compute`).
    dot: "tf32" adds the rounding of both operands of every matrix product.
    """
    raise NotImplementedError


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """value, as a candidate reads it back after having stored it in `dtype`.

    Call it inside `fn` for every 16-bit stage, saved result and output, as soon as the golden has made it. Under
    `running_bounds` the rounding joins the error of everything that follows, backward included; under `legal_runs` the
    value itself is rounded (gradient: identity); elsewhere the argument comes back untouched.
    """
    return value
