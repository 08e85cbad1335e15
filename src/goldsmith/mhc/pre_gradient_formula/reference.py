"""mhc.pre_backward in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas


def forward(
    grad_h_in: Tensor,
    grad_h_post: Tensor,
    grad_logits: Tensor,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    gamma: Tensor | None,
    grad_x_post: Tensor | None,
    *,
    pre_eps: float,
    post_mult: float,
) -> tuple[Tensor, ...]:
    u, dh_pre = formulas.collapse_gradient(grad_h_in, x)
    s = h_pre - pre_eps
    dl_pre = stage("dh_pre", dh_pre) * s * (1 - s)
    dl_post = stage("dh_post", grad_h_post) * h_post * (1 - h_post / post_mult)
    dlogits = stage("dlogits", torch.cat([dl_pre, dl_post, grad_logits.flatten(-2)], -1))
    tensors = {"x": x, "phi": phi, "alpha": alpha, "gamma": gamma, "inv_rms": inv_rms, "h_mix": h_mix}
    groups = formulas.groups_of(x.shape[-2])
    gradients = formulas.mix_gradients(dlogits, tensors, groups, collapsed=(h_pre, u), grad_x_post=grad_x_post)
    tensors["bias"] = alpha.new_empty(phi.shape[0])
    return formulas.as_results(formulas.as_stages(gradients, tensors), tensors)
