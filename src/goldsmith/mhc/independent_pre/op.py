"""mhc.independent_pre: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, MIX_GRADIENTS, check_mixing, check_numbers

INDEPENDENT_PRE = Op(
    "mhc.independent_pre",
    schema="(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, "
    "float rms_eps, float pre_eps, float post_mult, float post_eps) "
    "-> (Tensor h_in, Tensor h_post, Tensor inv_rms, Tensor h_mix)",
    saved=("inv_rms", "h_mix"),
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "phi", "alpha", "bias", "gamma"),
    stages=("inv_rms", "h_mix", "h_pre", "h_post", "h_in")
    + ("dh_pre", "dh_post", "dlogits", "dm", "projection", "rms", "collapse", *MIX_GRADIENTS),
    summary="mhc.pre of a connection that does not mix its streams",
)


def independent_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    gamma: Tensor | None = None,
    rms_eps: float = 1e-6,
    pre_eps: float = 1e-6,
    post_mult: float = 2.0,
    post_eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """l = alpha * rsqrt(mean(X^2) + rms_eps) * (gamma * X) phi^T + bias
    h_in = sum_i (sigmoid(l_pre[i]) + pre_eps) * x[i],  h_post = post_mult * sigmoid(l_post) + post_eps

    x [..., n, dim]; phi [2n, n*dim], rows of pre, then of post; alpha [2]; bias [2n]; gamma None, [n*dim] or [n, dim].
    Returns h_in [..., dim] in x's dtype (summed in float32, rounded once) and h_post [..., n] in float32 (float64 for
    float64 x). The streams are not mixed: `mhc.inject` adds the layer's output to them.

    Differentiable in x, phi, alpha, bias and gamma. Raises ShapeError, TypeError, ValueError, BackendUnavailable.
    Source: huggingface/transformers hy_v4.
    """
    return INDEPENDENT_PRE(
        x, phi, alpha, bias, gamma,
        rms_eps=rms_eps, pre_eps=pre_eps, post_mult=post_mult, post_eps=post_eps, backend=backend,
    )  # fmt: skip


def check(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, **numbers: float) -> None:
    check_mixing("mhc.independent_pre", x, phi, alpha, bias, gamma, groups=2)
    check_numbers("mhc.independent_pre", **numbers)
