"""mhc.boundary: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from .._common import AXES, POST_GRADIENTS, PRE_OPTIONS, check_post, check_pre

BOUNDARY = Op(
    "mhc.boundary",
    schema="(Tensor x, Tensor f, Tensor h_post, Tensor h_res, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, "
    f"{PRE_OPTIONS}, str orientation) "
    "-> (Tensor x_next, Tensor h_in, Tensor h_post_next, Tensor h_res_next, Tensor inv_rms, Tensor h_mix)",
    saved=("inv_rms", "h_mix"),
    residuals=("x", "f", "h_post", "h_res", "phi", "alpha", "bias", "gamma", "x_next", "inv_rms", "h_mix"),
    package=__package__,
    axes=AXES,
    backends=("triton",),
    grads=("x", "f", "h_post", "h_res", "phi", "alpha", "bias", "gamma"),
    stages=(
        "mix",
        "inject",
        "x_next",
        "inv_rms",
        "h_mix",
        "h_pre_next",
        "h_res_logits",
        "h_post_next",
        "h_res_next",
        "h_in",
    )
    + ("dh_pre", "dh_post_next", "dlogits", "dm", "projection", "rms", "collapse", "post", "dx_next")
    + ("dphi", "dalpha", "dbias", "dgamma", *POST_GRADIENTS),
    summary="post of one connection and pre of the next together",
)


def boundary(
    x: Tensor,
    f: Tensor,
    h_post: Tensor,
    h_res: Tensor,
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
    orientation: str = "in_out",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_next, *pre(x_next, phi, alpha, bias, ...))  with  x_next = post(x, f, h_post, h_res)

    Equal to separate `post` and `pre` bit for bit on the same backend; shapes, dtypes and keywords are theirs. Returns
    x_next [..., n, dim], h_in [..., dim] and the next connection's h_post [..., n] and h_res [..., n, n].
    Differentiable in every tensor; the gradient of x_next is not rounded between pre's and post's backward. Raises
    ShapeError, TypeError, ValueError, BackendUnavailable. Source: Xie et al. 2026, mHC.
    """
    return BOUNDARY(
        x, f, h_post, h_res, phi, alpha, bias, gamma,
        rms_eps=rms_eps, pre_eps=pre_eps, post_mult=post_mult, iterations=iterations, sinkhorn_eps=sinkhorn_eps,
        form=form, sinkhorn=sinkhorn, rms_form=rms_form, orientation=orientation, backend=backend,
    )  # fmt: skip


def check(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None,
    *, orientation: str, form: str, rms_form: str, sinkhorn: bool, **numbers: float,
) -> None:  # fmt: skip
    check_post("mhc.boundary", x, f, h_post, h_res, orientation)
    check_pre("mhc.boundary", x, phi, alpha, bias, gamma, form=form, rms_form=rms_form, sinkhorn=sinkhorn, **numbers)
