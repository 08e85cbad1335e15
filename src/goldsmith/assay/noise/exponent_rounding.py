"""How far an exponential of a difference moves by rounding, such as exp(x - logsumexp(x)).

    |error| <= (exp(2 u M) - 1) |result|,  M the largest number of whose differences the golden takes an exponential

A formula that is as stable as exp(x - max) / sum stores the logarithm of the sum, and its backward subtracts that from
x. Both numbers have the size of x, and the exponential makes a relative error of their two roundings: u |y| where
y = logsumexp(x) is stored, and u |x - y| where it is subtracted, with |x - y| below M where the result is not 0. For
results of which one is nearly 1 no perturbed input shows it, because there the golden's sum perturbs both parts alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..bounds.bounded import unit_roundoff
from ..support.dispatch_mode import DispatchMode

_EXPONENTIALS = (torch.ops.aten.exp.default, torch.ops.aten.exp_.default, torch.ops.aten.exp2.default)
_OF_DIFFERENCES = (  # they subtract a maximum themselves
    torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default, torch.ops.aten.logsumexp.default,
)  # fmt: skip
_ROUNDINGS = 2.0


class _Exponents(DispatchMode):
    """largest: of the numbers whose differences became exponents."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0
        self.differences = dict[int, tuple[Tensor, float]]()  # by identity of their memory, which stays alive here

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func in _OF_DIFFERENCES:
            self.largest = max(self.largest, _size(args[0]))
        elif func in _EXPONENTIALS:
            self.largest = max(self.largest, self.differences.get(args[0].data_ptr(), (None, 0.0))[1])
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sub.Tensor and isinstance(out, Tensor):
            self.differences[out.data_ptr()] = out, max(map(_size, args[:2]))
        return out


def _size(value: object) -> float:
    """The largest finite magnitude."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return float(torch.where(torch.isfinite(value), value.abs(), 0.0).max())


def relative(
    evaluate: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], leaves: Mapping[str, Tensor], compute: torch.dtype
) -> float:
    """The largest relative error; 0 where the golden takes no exponential of a difference."""
    with _Exponents() as mode:
        try:
            evaluate({n: t.clone() for n, t in leaves.items()})
        except (RuntimeError, TypeError):  # a tensor without a plain storage has no address
            return 0.0
    return math.expm1(min(1.0, _ROUNDINGS * unit_roundoff(compute) * mode.largest))
