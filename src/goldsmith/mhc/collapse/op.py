"""mhc.collapse: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, check_coefficient, check_streams

COLLAPSE = Op(
    "mhc.collapse",
    schema="(Tensor x, Tensor h_pre) -> (Tensor h_in)",
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "h_pre"),
    stages=("h_in", "dh_pre", "dx"),
    summary="the weighted sum of the streams",
)


def collapse(x: Tensor, h_pre: Tensor, *, backend: str = "auto") -> Tensor:
    """h_in = sum_i h_pre[i] * x[i]

    x [..., n, dim], h_pre [..., n] (float32; float64 for float64 x) -> [..., dim] in x's dtype, summed in float32 and
    rounded once. `mhc.pre` does this with its own h_pre; a lagged stack ends with it.

    Differentiable in both. Raises ShapeError, TypeError, ValueError, BackendUnavailable.
    """
    return COLLAPSE(x, h_pre, backend=backend)


def check(x: Tensor, h_pre: Tensor) -> None:
    check_streams("mhc.collapse", "x", x)
    check_coefficient("mhc.collapse", "h_pre", h_pre, x)
    COLLAPSE.check_axes({"x": x, "h_pre": h_pre})
