"""mhc.post: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, POST_GRADIENTS, check_post

POST = Op(
    "mhc.post",
    schema="(Tensor x, Tensor f, Tensor h_post, Tensor h_res, str orientation) -> (Tensor x_next)",
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "f", "h_post", "h_res"),
    stages=("mix", "inject", "x_next", *POST_GRADIENTS),
    summary="mixes the streams and adds the layer's output to each",
)


def post(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, *, orientation: str = "in_out", backend: str = "auto"
) -> Tensor:
    """x_next[k] = sum_j h_res[j, k] * x[j] + h_post[k] * f        orientation "in_out": h_res[input, output]
    x_next[o] = sum_i h_res[o, i] * x[i] + h_post[o] * f           orientation "out_in": h_res[output, input]

    x [..., n, dim], f [..., dim], h_post [..., n], h_res [..., n, n] (float32; float64 for float64 x) -> [..., n, dim]
    in x's dtype, summed in float32 and rounded once. DeepSeek, CANN and TransformerEngine use "in_out", Megatron and
    Liger "out_in". These are different models, since h_res is not symmetric.

    Differentiable in all four. Leading dimensions must agree; nothing is broadcast. Raises ShapeError, TypeError,
    ValueError, BackendUnavailable. Source: Xie et al. 2026, mHC; DeepSeek's published model code.
    """
    return POST(x, f, h_post, h_res, orientation=orientation, backend=backend)


def check(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, *, orientation: str) -> None:
    check_post("mhc.post", x, f, h_post, h_res, orientation)
