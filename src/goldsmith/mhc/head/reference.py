"""mhc.head in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *, rms_eps: float, pre_eps: float
) -> tuple[Tensor, ...]:
    """h = sum_i h_pre[i] x[i], with h_pre = sigmoid(l_pre) + pre_eps; returns (h, inv_rms, h_mix)."""
    inv_rms, h_mix = formulas.mix(x, phi, gamma, rms_eps)
    (l_pre,) = formulas.scores(inv_rms, h_mix, alpha, bias, (x.shape[-2],))
    h_pre = stage("h_pre", torch.sigmoid(l_pre) + pre_eps)
    return stage("h", formulas.collapse(h_pre, x)), inv_rms, h_mix


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    """The gradients of x, phi, alpha, bias and gamma; u is the gradient of h in the dtype of the sums."""
    x = tensors["x"]
    groups = (x.shape[-2],)
    (l_pre,) = formulas.scores(tensors["inv_rms"], tensors["h_mix"], tensors["alpha"], tensors["bias"], groups)
    u, dh_pre = formulas.collapse_gradient(grads["h"], x)
    dlogits = stage("dlogits", stage("dh_pre", dh_pre) * formulas.sigmoid_gradient(l_pre))
    h_pre = torch.sigmoid(l_pre) + options["pre_eps"]
    gradients = formulas.mix_gradients(dlogits, tensors, groups, collapsed=(h_pre, u))
    return formulas.as_stages(gradients, tensors)
