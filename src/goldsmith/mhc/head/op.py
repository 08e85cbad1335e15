"""mhc.head: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, MIX_GRADIENTS, check_mixing, check_numbers

HEAD = Op(
    "mhc.head",
    schema="(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, float rms_eps, float pre_eps) "
    "-> (Tensor h, Tensor inv_rms, Tensor h_mix)",
    saved=("inv_rms", "h_mix"),
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "phi", "alpha", "bias", "gamma"),
    stages=("inv_rms", "h_mix", "h_pre", "h")
    + ("dh_pre", "dlogits", "dm", "projection", "rms", "collapse", *MIX_GRADIENTS),
    summary="collapses the streams to one at the model's end",
)


def head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    gamma: Tensor | None = None,
    rms_eps: float = 1e-6,
    pre_eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """h = sum_i (sigmoid(alpha * z[i] + bias[i]) + pre_eps) * x[i],  z = rsqrt(mean(X^2) + rms_eps) * (gamma * X) phi^T

    x [..., n, dim] -> [..., dim] in x's dtype, summed in float32 and rounded once; phi [n, n*dim], alpha [1], bias [n],
    gamma None, [n*dim] or [n, dim].

    Differentiable in all five. Raises ShapeError, TypeError, ValueError, BackendUnavailable.
    Source: DeepSeek's published model code (hc_head).
    """
    return HEAD(x, phi, alpha, bias, gamma, rms_eps=rms_eps, pre_eps=pre_eps, backend=backend)


def check(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *, rms_eps: float, pre_eps: float
) -> None:
    check_mixing("mhc.head", x, phi, alpha, bias, gamma, groups=1)
    check_numbers("mhc.head", rms_eps=rms_eps, pre_eps=pre_eps)
