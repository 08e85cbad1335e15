"""Formulas that several references of the family share; README.md explains the letters.

T tokens (any leading dimensions), n streams, D dim, K = n*D. Groups are the sizes of the segments of the mixes:
(n, n, n*n) for pre, post and res, (n,) for the head. Each segment has its own alpha.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.tracing import stage
from ._common import sum_dtype


def groups_of(n: int) -> tuple[int, int, int]:
    return n, n, n * n


def spread(alpha: Tensor, groups: tuple[int, ...]) -> Tensor:
    """alpha [len(groups)] repeated to one value per mix, [M]."""
    return torch.cat([alpha[i].expand(size) for i, size in enumerate(groups)])


def weight(gamma: Tensor | None, x: Tensor) -> Tensor | float:
    """gamma as [K] in the dtype of the sums; 1 without gamma."""
    return 1.0 if gamma is None else gamma.reshape(-1).to(sum_dtype(x.dtype))


def mix(
    x: Tensor, phi: Tensor, gamma: Tensor | None, rms_eps: float, rms_form: str = "inside"
) -> tuple[Tensor, Tensor]:
    """inv_rms = rsqrt(mean(X^2) + rms_eps), or 1 / (rms(X) + rms_eps) for "outside";  h_mix = (gamma * X) phi^T"""
    vec = x.to(sum_dtype(x.dtype)).flatten(-2)
    inv_rms = 1 / (rms(vec) + rms_eps) if rms_form == "outside" else torch.rsqrt(vec.square().mean(-1) + rms_eps)
    inv_rms = stage("inv_rms", inv_rms)
    h_mix = stage("h_mix", (vec * weight(gamma, x)) @ phi.to(vec.dtype).mT)
    return inv_rms, h_mix


def rms(vec: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vec, dim=-1) / vec.shape[-1] ** 0.5


def scores(inv_rms: Tensor, h_mix: Tensor, alpha: Tensor, bias: Tensor, groups: tuple[int, ...]) -> tuple[Tensor, ...]:
    """l = alpha * inv_rms * h_mix + bias, one tensor per group"""
    logits = spread(alpha.to(h_mix.dtype), groups) * (inv_rms.unsqueeze(-1) * h_mix) + bias.to(h_mix.dtype)
    return logits.split(groups, -1)


def collapse(h_pre: Tensor, x: Tensor) -> Tensor:
    """h_in = sum_i h_pre[i] x[i]"""
    return (h_pre.unsqueeze(-1) * x.to(h_pre.dtype)).sum(-2).to(x.dtype)


def sigmoid_gradient(logits: Tensor) -> Tensor:
    s = torch.sigmoid(logits)
    return s * (1 - s)


def collapse_gradient(grad_h_in: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """u = dL/dh_in (zeros for None), and dh_pre[i] = <u, x[i]>"""
    stream = x.to(sum_dtype(x.dtype))
    u = torch.zeros_like(stream[..., 0, :]) if grad_h_in is None else grad_h_in.to(stream.dtype)
    return u, (u.unsqueeze(-2) * stream).sum(-1)


def mix_gradients(
    dlogits: Tensor,
    tensors: dict[str, Any],
    groups: tuple[int, ...],
    *,
    collapsed: tuple[Tensor, Tensor] | None = None,
    grad_x_post: Tensor | None = None,
    rms_form: str = "inside",
) -> dict[str, Tensor]:
    """Gradients of x, phi, alpha, bias and gamma from the gradient of the logits, in the dtype of the sums.

    z = r m;  dz = alpha dl;  dm = r dz;  dphi = dm^T (gamma X);  dgamma = sum_t (dm phi) X
    dx = dm (phi gamma) - (dz . z) r^2 / K X + h_pre (x) u + grad_x_post        collapsed = (h_pre, u)
    rms_form "outside": (dz . z) r / (K rms(X)) in place of (dz . z) r^2 / K
    """
    x, phi, alpha, gamma = (tensors[name] for name in ("x", "phi", "alpha", "gamma"))
    vec = x.to(sum_dtype(x.dtype)).flatten(-2)
    phi = phi.to(vec.dtype)
    r = tensors["inv_rms"].unsqueeze(-1)
    z = r * tensors["h_mix"]
    dz = spread(alpha.to(vec.dtype), groups) * dlogits
    dm = stage("dm", r * dz)
    slope = r.square()
    if rms_form == "outside":
        norms = rms(vec).unsqueeze(-1)
        slope = torch.where(norms > 0, r / norms, 0.0)  # without streams there is no direction to scale
    kappa = (dz * z).sum(-1, keepdim=True) * slope / vec.shape[-1]
    projection = stage("projection", (dm @ (phi * weight(gamma, x))).reshape(x.shape))
    dx = projection + stage("rms", (-kappa * vec).reshape(x.shape))
    if collapsed is not None:
        h_pre, u = collapsed
        dx = dx + stage("collapse", h_pre.unsqueeze(-1) * u.unsqueeze(-2))
    if grad_x_post is not None:
        dx = dx + stage("post", grad_x_post.to(vec.dtype))
    per_group = over_tokens(dlogits * z).sum(0).split(groups, -1)
    gradients = {
        "x": dx,
        "phi": over_tokens(dm).mT @ over_tokens(vec * weight(gamma, x)),
        "alpha": torch.stack([mixes.sum() for mixes in per_group]),
        "bias": over_tokens(dlogits).sum(0),
    }
    if gamma is not None:
        gradients["gamma"] = over_tokens((dm @ phi) * vec).sum(0)
    return gradients


def or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad.to(like.dtype)


def in_dtypes_of_inputs(gradients: dict[str, Tensor], tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Each gradient in the shape and dtype of its input. This is the only rounding."""
    return {name: grad.reshape(tensors[name].shape).to(tensors[name].dtype) for name, grad in gradients.items()}


def as_stages(gradients: dict[str, Tensor], tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients rounded to their inputs' dtypes, as stages dx, dphi, dalpha, dbias and dgamma."""
    return {name: stage(f"d{name}", grad) for name, grad in in_dtypes_of_inputs(gradients, tensors).items()}


def as_results(gradients: dict[str, Tensor], tensors: dict[str, Any]) -> tuple[Tensor, ...]:
    """(dx, dphi, dalpha, dbias, dgamma); dgamma is empty without gamma."""
    gradients = in_dtypes_of_inputs(gradients, tensors)
    none = gradients["alpha"].new_empty(0)
    return gradients["x"], gradients["phi"], gradients["alpha"], gradients["bias"], gradients.get("gamma", none)


def over_tokens(value: Tensor) -> Tensor:
    """[..., M] -> [T, M]"""
    return value.reshape(-1, value.shape[-1])
