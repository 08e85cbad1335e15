"""RuleContext: the questions that a rule of the error analysis may ask about its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

Operand = Tensor | float  # what an operator takes: a tensor or a Python number
Error = Tensor | float  # a float64 tensor that broadcasts to the value, or 0.0 for exact
Errors = Error | tuple[Error, ...]  # one for every result of an operator
Rule = Callable[..., Errors]
Dim = int | Sequence[int] | None  # the axes of a reduction; None or [] for all


class RuleContext(Protocol):
    """The running analysis, as rules see it; `RunningErrors` implements it.

    compute       the precision promised for sums; u is its unit roundoff
    operand_unit  the rounding of a matrix product's operands on tensor cores, 0.0 for IEEE products
    read_back     the unit roundoff of outputs that a backward may read again, or 0.0; least_back is the smallest
                  normal number of their dtype
    """

    compute: torch.dtype
    u: float
    operand_unit: float
    read_back: float
    least_back: float

    @overload
    def __call__(self, x: Tensor) -> tuple[Tensor, Error]: ...

    @overload
    def __call__(self, x: Operand) -> tuple[Operand, Error]: ...

    def rounding(self, y: Tensor, c: float | Tensor = 1.0) -> Error: ...

    def gamma(self, n: int) -> float: ...

    def error_of(self, t: Tensor) -> Error: ...

    def terms_of(self, x: Operand) -> int: ...

    def size_of(self, t: Tensor) -> Tensor: ...
