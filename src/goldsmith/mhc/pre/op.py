"""mhc.pre: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, MIX_GRADIENTS, PRE_GRADIENT_STAGES, PRE_OPTIONS, check_pre

PRE = Op(
    "mhc.pre",
    schema=f"(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, {PRE_OPTIONS}) "
    "-> (Tensor h_in, Tensor h_post, Tensor h_res, Tensor inv_rms, Tensor h_mix)",
    saved=("inv_rms", "h_mix"),
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "phi", "alpha", "bias", "gamma"),
    stages=("inv_rms", "h_mix", "h_pre", "h_res_logits", "h_post", "h_res", "h_in")
    + (*PRE_GRADIENT_STAGES, *MIX_GRADIENTS),
    summary="computes the coefficients and collapses the streams to the layer's input",
)


def pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    gamma: Tensor | None = None,
    rms_eps: float = 1e-6,
    pre_eps: float = 1e-6,
    post_mult: float = 2.0,
    iterations: int = 20,
    sinkhorn_eps: float = 1e-6,
    form: str = "deepseek",
    sinkhorn: bool = True,
    rms_form: str = "inside",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """h_in = sum_i h_pre[i] * x[i],  with (h_pre, h_post, h_res) = coefficients(x, phi, alpha, bias, ...)

    x [..., n, dim] in bfloat16, float16, float32 or float64 -> h_in [..., dim] in x's dtype (summed in float32, rounded
    once), h_post [..., n] and h_res [..., n, n] in float32 (float64 for float64 x). Shapes and keywords as in
    `coefficients`. With sinkhorn=False (CANN's form) the third result is the logits; `mhc.sinkhorn` of them equals
    h_res bit for bit.

    Differentiable in x, phi, alpha, bias and gamma; the backward keeps x and 4*(1 + M) bytes per token (100 at n=4).
    Raises ShapeError (the message lists the shapes and the likely mistake), TypeError, ValueError, BackendUnavailable.
    Source: Xie et al. 2026, mHC; DeepSeek's published model code; CANN's aclnnMhcPre.
    """
    return PRE(
        x, phi, alpha, bias, gamma,
        rms_eps=rms_eps, pre_eps=pre_eps, post_mult=post_mult, iterations=iterations, sinkhorn_eps=sinkhorn_eps,
        form=form, sinkhorn=sinkhorn, rms_form=rms_form, backend=backend,
    )  # fmt: skip


def check(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    *,
    form: str,
    rms_form: str,
    sinkhorn: bool,
    **numbers: float,
) -> None:
    check_pre("mhc.pre", x, phi, alpha, bias, gamma, form=form, rms_form=rms_form, sinkhorn=sinkhorn, **numbers)
