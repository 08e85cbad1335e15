"""mhc.coefficients: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, MIX_GRADIENTS, PRE_OPTIONS, check_pre

COEFFICIENTS = Op(
    "mhc.coefficients",
    schema=f"(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, {PRE_OPTIONS}) "
    "-> (Tensor h_pre, Tensor h_post, Tensor h_res, Tensor inv_rms, Tensor h_mix)",
    saved=("inv_rms", "h_mix"),
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "phi", "alpha", "bias", "gamma"),
    stages=("inv_rms", "h_mix", "h_pre", "h_post", "h_res_logits", "h_res")
    + ("dh_pre", "dh_post", "dlogits", "dm", "projection", "rms", *MIX_GRADIENTS),
    summary="h_pre, h_post and h_res of every token",
)


def coefficients(
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
    """l = alpha * rsqrt(mean(X^2) + rms_eps) * (gamma * X) phi^T + bias
    h_pre = sigmoid(l_pre) + pre_eps,  h_post = post_mult * sigmoid(l_post),  h_res = sinkhorn(l_res as [n, n])

    x [..., n, dim]; X is x with its last two dimensions flattened, K = n*dim. phi [M, K], M = 2n + n^2: rows of pre,
    post, res (row-major); alpha [3]; bias [M]; gamma None, [K] or [n, dim]. Returns h_pre [..., n], h_post [..., n],
    h_res [..., n, n] in float32 (float64 for float64 x). rms_form="outside" (Megatron-LM) normalises by 1 / (rms(X) +
    rms_eps) instead; reference only. sinkhorn=False (CANN's form) returns the logits l_res in place
    of h_res.

    Differentiable in x, phi, alpha, bias and gamma. Raises ShapeError (the message lists the shapes and the likely
    mistake), TypeError, ValueError, BackendUnavailable. Source: Xie et al. 2026, mHC; DeepSeek's published model code.
    """
    return COEFFICIENTS(
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
    check_pre(
        "mhc.coefficients", x, phi, alpha, bias, gamma, form=form, rms_form=rms_form, sinkhorn=sinkhorn, **numbers
    )
