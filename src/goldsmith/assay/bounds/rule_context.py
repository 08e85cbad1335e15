"""RuleContext: what a rule of the error analysis may ask about its operands."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Error = Tensor | float  # a float64 tensor that broadcasts to the value, or 0.0 for exact


class RuleContext(Protocol):
    """The running analysis, as rules see it; `RunningErrors` implements it.

    compute       the precision promised for sums; u is its unit roundoff
    operand_unit  the rounding of a matrix product's operands on tensor cores, 0.0 for IEEE products
    read_back     the unit roundoff of outputs that a backward may read again, 0.0 where none is; least_back their
                  smallest normal number
    """

    compute: torch.dtype
    u: float
    operand_unit: float
    read_back: float
    least_back: float

    def __call__(self, x: Any) -> tuple[Any, Error]: ...

    def rounding(self, y: Tensor, c: float | Tensor = 1.0) -> Error: ...

    def gamma(self, n: int) -> float: ...

    def error_of(self, t: Tensor) -> Error: ...

    def terms_of(self, x: Any) -> int: ...

    def size_of(self, t: Tensor) -> Tensor: ...
