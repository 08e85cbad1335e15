"""mhc.connect_backward in plain torch."""

from __future__ import annotations

from torch import Tensor

from .. import _formulas as formulas
from .._common import sum_dtype
from ..coefficients import reference as coefficients
from ..independent_pre import reference as independent_pre
from ..post.reference import output_by_input


def forward(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_res: Tensor | None,
    inv_rms: Tensor,
    h_mix: Tensor,
    grad_h_in: Tensor | None,
    grad_h_post: Tensor | None,
    grad_h_res: Tensor | None,
    grad_x_next: Tensor | None,
    *,
    orientation: str,
    **options: object,
) -> tuple[Tensor, ...]:
    """pre's backward with dx_post[j] = sum_k h_res[j, k] grad_x_next[k] added to dx.

    h_res is the matrix that post used: the rounded one if coefficient_dtype rounded it. Without it dx_post is
    grad_x_next.
    """
    grad_x_post = grad_x_next
    if grad_x_next is not None and h_res is not None:
        to = sum_dtype(x.dtype)
        grad_x_post = output_by_input(h_res.to(to), orientation).mT @ grad_x_next.to(to)
    grads = {"h_in": grad_h_in, "h_post": grad_h_post, "h_res": grad_h_res}
    tensors = {"x": x, "phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma, "inv_rms": inv_rms, "h_mix": h_mix}
    if h_res is None:
        gradients = independent_pre.gradients(grads, tensors, options, grad_x_post=grad_x_post)
    else:
        gradients = coefficients.gradients(grads, tensors, {**options, "sinkhorn": True}, grad_x_post=grad_x_post)
    return formulas.as_results(formulas.as_stages(gradients, tensors), tensors)
