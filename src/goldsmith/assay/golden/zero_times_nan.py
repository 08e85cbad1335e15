"""The golden where nothing times NaN is nothing: which of its NaN are made by a zero alone.

    0 * NaN = 0 in products and sums of products; everything else as torch has it

A golden that gathers after it has chosen sends a gradient of zeros to what was not chosen, and multiplies them with
what may be NaN; a kernel that never touches those rows is as right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..support.dispatch_mode import DispatchMode

_aten = torch.ops.aten
_SUMS = {_aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default}


class _Nothing(DispatchMode):
    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
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
    """The gradients that `evaluate` makes of the leaves so; none where it raises."""
    try:
        with _Nothing():
            found = evaluate({n: t.clone() for n, t in leaves.items()})
    except (RuntimeError, TypeError):  # what has no plain storage
        return {}
    return {n: t for n, t in found.items() if n.endswith(".grad")}
