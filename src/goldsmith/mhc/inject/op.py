"""mhc.inject: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, check_post

INJECT = Op(
    "mhc.inject",
    schema="(Tensor x, Tensor f, Tensor h_post) -> (Tensor x_next)",
    residuals=("x", "f", "h_post"),
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "f", "h_post"),
    stages=("inject", "x_next", "dx_post", "df", "dh_post"),
    summary="adds the layer's output to every stream",
)


def inject(x: Tensor, f: Tensor, h_post: Tensor, *, backend: str = "auto") -> Tensor:
    """x_next[i] = x[i] + h_post[i] * f

    x [..., n, dim], f [..., dim], h_post [..., n] (float32; float64 for float64 x) -> [..., n, dim] in x's dtype,
    summed in float32 and rounded once. This is `mhc.post` with the identity in place of h_res.

    Differentiable in all three. Leading dimensions must agree; nothing is broadcast. Raises ShapeError, TypeError,
    ValueError, BackendUnavailable. Source: huggingface/transformers hy_v4 and qwen4_exp.
    """
    return INJECT(x, f, h_post, backend=backend)


def check(x: Tensor, f: Tensor, h_post: Tensor) -> None:
    check_post("mhc.inject", x, f, h_post, None, "in_out")
