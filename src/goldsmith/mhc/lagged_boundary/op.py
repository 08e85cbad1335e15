"""mhc.lagged_boundary: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from ...core.shapes import check_shapes
from .._common import AXES, POST_GRADIENTS, PRE_OPTIONS, check_coefficient, check_post, check_pre

LAGGED_BOUNDARY = Op(
    "mhc.lagged_boundary",
    schema="(Tensor x, Tensor f, Tensor h_pre, Tensor h_post, Tensor h_res, Tensor phi, Tensor alpha, Tensor bias, "
    f"Tensor? gamma, {PRE_OPTIONS}, str orientation) -> (Tensor x_next, Tensor h_in, Tensor h_pre_next, "
    "Tensor h_post_next, Tensor h_res_next, Tensor inv_rms, Tensor h_mix)",
    saved=("inv_rms", "h_mix"),
    residuals=("x", "f", "h_pre", "h_post", "h_res", "phi", "alpha", "bias", "gamma", "x_next", "inv_rms", "h_mix"),
    package=__package__,
    axes=AXES | {"h_pre_next": AXES["h_pre"]},
    backends=("triton",),
    grads=("x", "f", "h_pre", "h_post", "h_res", "phi", "alpha", "bias", "gamma"),
    stages=(
        "mix",
        "inject",
        "x_next",
        "h_in",
        "inv_rms",
        "h_mix",
        "h_pre_next",
        "h_res_logits",
        "h_post_next",
        "h_res_next",
    )
    + ("dh_pre", "dh_post_next", "dlogits", "dm", "projection", "rms", "post", "dx_next")
    + ("dphi", "dalpha", "dbias", "dgamma", "dh_pre_before", *POST_GRADIENTS),
    summary="mhc.boundary of the lagged scheme: h_in uses the h_pre of the connection before",
)


def lagged_boundary(
    x: Tensor,
    f: Tensor,
    h_pre: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_next = post(x, f, h_post, h_res);  h_in = sum_i h_pre[i] * x_next[i]
    (h_pre_next, h_post_next, h_res_next) = coefficients(x_next, phi, alpha, bias, ...)

    h_pre, h_post and h_res are those that the connection before this boundary has predicted, so h_in does not wait for
    the coefficients of x_next: one pass over the streams computes everything. Shapes, dtypes and keywords are those of
    `post` and `coefficients`. Returns x_next [..., n, dim], h_in [..., dim], h_pre_next [..., n], h_post_next [..., n]
    and h_res_next [..., n, n].

    Differentiable in every tensor; the gradient of x_next is rounded once. Raises ShapeError, TypeError, ValueError,
    BackendUnavailable. Source: DeepSeek-V4.1 as sgl-project/sglang 0.5.23 runs it (hc_pre_from_prev_sublayer).
    """
    return LAGGED_BOUNDARY(
        x, f, h_pre, h_post, h_res, phi, alpha, bias, gamma,
        rms_eps=rms_eps, pre_eps=pre_eps, post_mult=post_mult, iterations=iterations, sinkhorn_eps=sinkhorn_eps,
        form=form, sinkhorn=sinkhorn, rms_form=rms_form, orientation=orientation, backend=backend,
    )  # fmt: skip


def check(
    x: Tensor, f: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor,
    gamma: Tensor | None, *, orientation: str, form: str, rms_form: str, sinkhorn: bool, **numbers: float,
) -> None:  # fmt: skip
    op = LAGGED_BOUNDARY.name
    check_post(op, x, f, h_post, h_res, orientation)
    check_coefficient(op, "h_pre", h_pre, x)
    check_shapes(op, {"h_post": (h_post, "*batch n"), "h_pre": (h_pre, "*batch n")})
    check_pre(op, x, phi, alpha, bias, gamma, form=form, rms_form=rms_form, sinkhorn=sinkhorn, **numbers)
