"""Gradients of the golden under 0 * NaN = 0, which show the NaN that come only from a factor 0.

    0 * NaN = 0 in products and sums of products
    the slope of a function in pieces, such as ReLU, is 0 at NaN
    everything else as in torch

A golden that gathers after a selection sends zero gradients to unselected rows and multiplies them with numbers that
may be NaN; a kernel that never touches those rows is just as right. At NaN, torch.relu passes its gradient on and
torch.clamp does not; both are right, because no comparison with NaN holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..support.dispatch_mode import DispatchMode

_aten = torch.ops.aten
_PIECES = {  # backward functions of (grad, input, ...)
    _aten.threshold_backward.default, _aten.hardtanh_backward.default, _aten.leaky_relu_backward.default,
    _aten.hardshrink_backward.default, _aten.softshrink_backward.default, _aten.hardsigmoid_backward.default,
    _aten.hardswish_backward.default,
}  # fmt: skip
_SUMS = {_aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default}


class _ZeroTimesNaN(DispatchMode):
    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func in _PIECES:
            out = func(*args, **(kwargs or {}))
            return out.masked_fill(args[1].isnan(), 0.0)
        if kwargs or len(args) != 2 or not all(isinstance(a, Tensor) and a.is_floating_point() for a in args):
            return func(*args, **(kwargs or {}))
        a, b = args
        if func is _aten.mul.Tensor:
            out = func(a, b)
            return torch.where((a == 0) | (b == 0), torch.zeros_like(out), out)
        if func not in _SUMS:
            return func(a, b)
        out = func(a.nan_to_num(0.0, torch.inf, -torch.inf), b.nan_to_num(0.0, torch.inf, -torch.inf))
        lost = [
            func(left.to(out.dtype), right.to(out.dtype)) for left, right in ((a.isnan(), b != 0), (a != 0, b.isnan()))
        ]
        return out.masked_fill(sum(lost) > 0, torch.nan)


def gradients(
    evaluate: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients that `evaluate` returns under 0 * NaN = 0; empty if it raises."""
    try:
        with _ZeroTimesNaN():
            results = evaluate({n: t.clone() for n, t in leaves.items()})
    except (RuntimeError, TypeError):  # tensors without a plain storage
        return {}
    return {n: t for n, t in results.items() if n.endswith(".grad")}
