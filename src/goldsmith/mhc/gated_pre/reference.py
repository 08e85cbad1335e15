"""mhc.gated_pre in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .._common import sum_dtype
from .._formulas import over_tokens, sigmoid_gradient


def forward(
    x: Tensor, gamma: Tensor, down: Tensor, up: Tensor, inject: Tensor | None, *, rms_eps: float, post_mult: float
) -> tuple[Tensor, ...]:
    """h_in, h_post, inv_rms, h_mix; h_mix holds the products with down, and behind them those with inject."""
    to, n, rank = sum_dtype(x.dtype), x.shape[-2], down.shape[0]
    streams = x.to(to)
    inv_rms = stage("inv_rms", torch.rsqrt(streams.square().mean(-1) + rms_eps))
    normed = stage("normed", streams * inv_rms.unsqueeze(-1) * gamma.to(to).reshape(x.shape[-2:]))
    h_mix = stage("h_mix", normed.flatten(-2) @ projections(down, inject, to).mT)
    hidden = stage("hidden", torch.nn.functional.silu(h_mix[..., :rank] / n))
    gates = stage("gates", torch.sigmoid(hidden @ up.to(to).mT).unflatten(-1, x.shape[-2:]))
    h_post = stage("h_post", post_mult * torch.sigmoid(h_mix[..., rank:] / n))
    return stage("h_in", (gates * normed).mean(-2).to(x.dtype)), h_post, inv_rms, h_mix


def projections(down: Tensor, inject: Tensor | None, to: torch.dtype) -> Tensor:
    """down and inject as one matrix, [rank (+ n), n*dim]"""
    return down.to(to) if inject is None else torch.cat([down.to(to), inject.to(to)])


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    """u and dh_post are the gradients of h_in and h_post; absent ones count as zero."""
    x, gamma, down, up, inject = (tensors[name] for name in ("x", "gamma", "down", "up", "inject"))
    to, n, rank = sum_dtype(x.dtype), x.shape[-2], down.shape[0]
    r, h_mix, weight = tensors["inv_rms"].unsqueeze(-1), tensors["h_mix"], gamma.to(to).reshape(x.shape[-2:])
    unit = x.to(to) * r
    normed = unit * weight
    s = h_mix[..., :rank] / n
    hidden = torch.nn.functional.silu(s)
    gates = torch.sigmoid(hidden @ up.to(to).mT).unflatten(-1, x.shape[-2:])

    u = torch.zeros_like(unit[..., :1, :]) if grads["h_in"] is None else grads["h_in"].to(to).unsqueeze(-2) / n
    dgates = stage("dgates", (u * normed * gates * (1 - gates)).flatten(-2))
    dhidden = stage("dhidden", dgates @ up.to(to))
    sigmoid = torch.sigmoid(s)
    ds = dhidden * sigmoid * (1 + s * (1 - sigmoid))
    dq = options["post_mult"] * sigmoid_gradient(h_mix[..., rank:] / n)
    dq = torch.zeros_like(dq) if grads["h_post"] is None else dq * grads["h_post"].to(to)
    dm = stage("dm", torch.cat([ds, dq], -1) / n)
    projected = (dm @ projections(down, inject, to)).unflatten(-1, x.shape[-2:])
    dnormed = stage("dnormed", u * gates + projected)
    dunit = dnormed * weight
    weights = over_tokens(dm).mT @ over_tokens(normed.flatten(-2))
    gradients = {
        "x": r * (dunit - unit * (dunit * unit).mean(-1, keepdim=True)),
        "gamma": over_tokens((dnormed * unit).flatten(-2)).sum(0),
        "down": weights[:rank],
        "up": over_tokens(dgates).mT @ over_tokens(hidden),
    }
    if inject is not None:
        gradients["inject"] = weights[rank:]
    return {
        name: stage(f"d{name}", grad.reshape(tensors[name].shape).to(tensors[name].dtype))
        for name, grad in gradients.items()
    }
