"""mhc.lagged_boundary in plain torch."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas
from .._common import CoefficientOptions, sum_dtype
from ..coefficients import reference as coefficients
from ..post import reference as post


def forward(
    x: Tensor,
    f: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    *,
    orientation: str,
    **options: Unpack[CoefficientOptions],
) -> tuple[Tensor, ...]:
    (x_next,) = post.forward(x, f, h_post, h_res, orientation=orientation)
    h_in = stage("h_in", formulas.collapse(h_pre.to(sum_dtype(x.dtype)), x_next))
    return x_next, h_in, *coefficients.forward(x_next, phi, alpha, bias, gamma, suffix="_next", **options)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    """post's backward starts from the unrounded dx_next: the gradient that arrives, h_pre u, and the coefficients'."""
    x_next, h_pre = tensors["x_next"], tensors["h_pre"]
    u, dh_pre = formulas.collapse_gradient(grads["h_in"], x_next)
    arriving = h_pre.to(u.dtype).unsqueeze(-1) * u.unsqueeze(-2)
    if grads["x_next"] is not None:
        arriving = arriving + grads["x_next"].to(u.dtype)
    of_next = {name: grads[f"{name}_next"] for name in ("h_pre", "h_post", "h_res")}
    after = tensors | {"x": x_next}
    below = coefficients.gradients(of_next, after, options, grad_x_post=arriving, suffix="_next")
    above = post.backward({"x_next": stage("dx_next", below.pop("x"))}, tensors, options, needs)
    above["h_pre"] = stage("dh_pre_before", dh_pre.to(h_pre.dtype))
    return formulas.as_stages(below, tensors) | above
