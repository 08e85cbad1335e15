"""mhc.independent_pre in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas


def forward(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    *,
    rms_eps: float,
    pre_eps: float,
    post_mult: float,
    post_eps: float,
) -> tuple[Tensor, ...]:
    n = x.shape[-2]
    inv_rms, h_mix = formulas.mix(x, phi, gamma, rms_eps)
    l_pre, l_post = formulas.scores(inv_rms, h_mix, alpha, bias, (n, n))
    h_pre = stage("h_pre", torch.sigmoid(l_pre) + pre_eps)
    h_post = stage("h_post", post_mult * torch.sigmoid(l_post) + post_eps)
    return stage("h_in", formulas.collapse(h_pre, x)), h_post, inv_rms, h_mix


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    return formulas.as_stages(gradients(grads, tensors, options), tensors)


def gradients(grads: dict, tensors: dict, options: dict, *, grad_x_post: Tensor | None = None) -> dict[str, Tensor]:
    """The backward, not yet rounded; `grad_x_post` is added to the gradient of x."""
    x = tensors["x"]
    groups = (x.shape[-2], x.shape[-2])
    l_pre, l_post = formulas.scores(tensors["inv_rms"], tensors["h_mix"], tensors["alpha"], tensors["bias"], groups)
    u, dh_pre = formulas.collapse_gradient(grads["h_in"], x)
    dh_pre = stage("dh_pre", dh_pre)
    dh_post = stage("dh_post", formulas.or_zero(grads["h_post"], l_post))
    dl_pre = dh_pre * formulas.sigmoid_gradient(l_pre)
    dl_post = dh_post * options["post_mult"] * formulas.sigmoid_gradient(l_post)
    dlogits = stage("dlogits", torch.cat([dl_pre, dl_post], -1))
    h_pre = torch.sigmoid(l_pre) + options["pre_eps"]
    return formulas.mix_gradients(dlogits, tensors, groups, collapsed=(h_pre, u), grad_x_post=grad_x_post)
