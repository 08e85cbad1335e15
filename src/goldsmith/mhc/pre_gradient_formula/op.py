"""mhc.pre_backward: its declaration, argument checks and public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.op import Op
from ...core.shapes import check_dtype, check_tensor
from .._common import AXES, FLOATS, MIX_GRADIENTS, PRE_GRADIENT_STAGES, check_coefficient, check_mixing, check_numbers

PRE_BACKWARD = Op(
    "mhc.pre_backward",
    schema="(Tensor grad_h_in, Tensor grad_h_post, Tensor grad_logits, Tensor x, Tensor phi, Tensor alpha, "
    "Tensor inv_rms, Tensor h_mix, Tensor h_pre, Tensor h_post, Tensor? gamma, Tensor? grad_x_post, "
    "float pre_eps, float post_mult) "
    "-> (Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)",
    package=__package__,
    axes=AXES | {"grad_logits": "*batch n n"},
    stages=(*PRE_GRADIENT_STAGES, "post", *MIX_GRADIENTS),
    summary="the gradients of pre, as the explicit formula of CANN's interface",
)  # fmt: skip


def pre_backward(
    grad_h_in: Tensor,
    grad_h_post: Tensor,
    grad_logits: Tensor,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    *,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    gamma: Tensor | None = None,
    grad_x_post: Tensor | None = None,
    pre_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dl = [dh_pre s (1-s), grad_h_post h_post (1 - h_post/post_mult), grad_logits]
    dh_pre[i] = <grad_h_in, x[i]>;  s = h_pre - pre_eps;  r = inv_rms;  z = r h_mix;  dz = alpha dl;  dm = r dz
    dx = dm (phi * gamma) - (dz . z) r^2 / K * X + h_pre (x) grad_h_in (+ grad_x_post)
    Psi = dm^T X;  dphi = Psi * gamma;  dgamma = sum_j Psi[j] * phi[j];  dalpha = sum dl z, by group;  dbias = sum dl

    The backward of `pre(..., sinkhorn=False)`: a golden for kernels with the interface aclnnMhcPreBackward. Plain torch
    for any float dtype of x (float64 for a golden). Shapes as in `pre`: grad_h_in [..., dim], grad_h_post [..., n],
    grad_logits [..., n, n], inv_rms [...], h_mix [..., M] (not normalised, gamma included). Returns dx [..., n, dim],
    dphi [M, K], dalpha [3], dbias [M] and dgamma (gamma's shape; None without gamma). Not differentiable itself.
    Raises ShapeError, TypeError, ValueError.
    """
    dx, dphi, dalpha, dbias, dgamma = PRE_BACKWARD(
        grad_h_in, grad_h_post, grad_logits, x, phi, alpha, inv_rms, h_mix, h_pre, h_post, gamma, grad_x_post,
        pre_eps=pre_eps, post_mult=post_mult,
    )  # fmt: skip
    return dx, dphi, dalpha, dbias, None if gamma is None else dgamma


def check(*tensors: Tensor, pre_eps: float, post_mult: float) -> None:
    op, arguments = "mhc.pre_backward", dict(zip(PRE_BACKWARD.inputs, tensors, strict=True))
    x = arguments["x"]
    check_mixing(op, x, arguments["phi"], arguments["alpha"], None, arguments["gamma"], biased=False)
    coefficients = ("grad_h_post", "grad_logits", "inv_rms", "h_mix", "h_pre", "h_post")
    for name in coefficients:
        check_coefficient(op, name, arguments[name], x)
    for name in ("grad_h_in", "grad_x_post"):
        if name == "grad_h_in" or arguments[name] is not None:
            check_tensor(op, name, arguments[name])
            check_dtype(op, name, arguments[name], FLOATS)
    PRE_BACKWARD.check_axes({n: arguments[n] for n in ("x", "phi", "grad_h_in", "grad_x_post", *coefficients)})
    check_numbers(op, pre_eps=pre_eps, post_mult=post_mult)


def fake(*tensors: Tensor, pre_eps: float, post_mult: float) -> tuple[Tensor, ...]:
    arguments = dict(zip(PRE_BACKWARD.inputs, tensors, strict=True))
    x, phi, alpha, gamma = (arguments[name] for name in ("x", "phi", "alpha", "gamma"))
    like = (x, phi, alpha, phi[:, 0], alpha[:0] if gamma is None else gamma)
    dtypes = (x.dtype, phi.dtype, alpha.dtype, alpha.dtype, alpha.dtype if gamma is None else gamma.dtype)
    return tuple(torch.empty(t.shape, dtype=dtype, device=t.device) for t, dtype in zip(like, dtypes, strict=True))
