"""mhc.coefficients in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .. import _formulas as formulas
from ..sinkhorn import reference as sinkhorn_reference


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
    iterations: int,
    sinkhorn_eps: float,
    form: str,
    sinkhorn: bool,
    rms_form: str = "inside",
    suffix: str = "",
) -> tuple[Tensor, ...]:
    """h_pre, h_post, h_res, inv_rms, h_mix. `suffix` is appended to the names of stages h_pre, h_post and h_res."""
    n = x.shape[-2]
    inv_rms, h_mix = formulas.mix(x, phi, gamma, rms_eps, rms_form)
    l_pre, l_post, l_res = formulas.scores(inv_rms, h_mix, alpha, bias, formulas.groups_of(n))
    h_pre = stage("h_pre" + suffix, torch.sigmoid(l_pre) + pre_eps)
    h_post = stage("h_post" + suffix, post_mult * torch.sigmoid(l_post))
    h_res = stage("h_res_logits", l_res.unflatten(-1, (n, n)))
    if sinkhorn:
        h_res = sinkhorn_reference.balanced(h_res, iterations=iterations, eps=sinkhorn_eps, form=form)
        h_res = stage("h_res" + suffix, h_res)
    return h_pre, h_post, h_res, inv_rms, h_mix


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    return formulas.as_stages(gradients(grads, tensors, options), tensors)


def gradients(
    grads: dict, tensors: dict, options: dict, *, grad_x_post: Tensor | None = None, suffix: str = ""
) -> dict[str, Tensor]:
    """The backward of coefficients and of pre, not yet rounded.

    Any of the gradients of h_in, h_pre, h_post and h_res may be missing or None. `suffix` is appended to the name of
    stage dh_post.
    """
    x = tensors["x"]
    n = x.shape[-2]
    groups = formulas.groups_of(n)
    l_pre, l_post, l_res = formulas.scores(
        tensors["inv_rms"], tensors["h_mix"], tensors["alpha"], tensors["bias"], groups
    )
    u, dh_pre = formulas.collapse_gradient(grads.get("h_in"), x)
    dh_pre = stage("dh_pre", dh_pre + formulas.or_zero(grads.get("h_pre"), l_pre))
    dh_post = stage("dh_post" + suffix, formulas.or_zero(grads["h_post"], l_post))
    dl_res = formulas.or_zero(grads["h_res"], l_res).reshape(*l_res.shape[:-1], n, n)
    if options["sinkhorn"]:
        steps = {"iterations": options["iterations"], "eps": options["sinkhorn_eps"], "form": options["form"]}
        dl_res = sinkhorn_reference.gradient(dl_res, l_res.unflatten(-1, (n, n)), **steps)
    dl_pre = dh_pre * formulas.sigmoid_gradient(l_pre)
    dl_post = dh_post * options["post_mult"] * formulas.sigmoid_gradient(l_post)
    dlogits = stage("dlogits", torch.cat([dl_pre, dl_post, dl_res.flatten(-2)], -1))
    collapsed = (torch.sigmoid(l_pre) + options["pre_eps"], u) if "h_in" in grads else None
    rms_form = options.get("rms_form", "inside")
    return formulas.mix_gradients(
        dlogits, tensors, groups, collapsed=collapsed, grad_x_post=grad_x_post, rms_form=rms_form
    )
