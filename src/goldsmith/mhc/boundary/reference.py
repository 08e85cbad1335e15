"""mhc.boundary in plain torch."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas
from .._common import CoefficientOptions
from ..coefficients import reference as coefficients
from ..post import reference as post
from ..pre import reference as pre


def forward(
    x: Tensor,
    f: Tensor,
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
    return x_next, *pre.forward(x_next, phi, alpha, bias, gamma, suffix="_next", **options)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    """post's backward starts from pre's unrounded dx, which already includes the gradient of x_next."""
    of_pre = {"h_in": grads["h_in"], "h_post": grads["h_post_next"], "h_res": grads["h_res_next"]}
    after = tensors | {"x": tensors["x_next"]}
    below = coefficients.gradients(of_pre, after, options, grad_x_post=grads["x_next"], suffix="_next")
    above = post.backward({"x_next": stage("dx_next", below.pop("x"))}, tensors, options, needs)
    return formulas.as_stages(below, tensors) | above
