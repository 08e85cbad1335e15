"""mhc.gated_pre on a GPU: norms, products with the weights stream by stream, gated mean.

Elements moved per token at n = 4, besides the products' weights: forward 4D (norms) + 4D (products) + 5D (mean). The
backward keeps two float32 tensors of the size of the streams between its passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .._kernels.gates import gamma_gradient, gated_mean, gates_backward, inverse_rms, norm_backward
from .._kernels.launch import rows, shaped, streams, unsupported_dtype, unsupported_n
from .._kernels.products import product


def unsupported(tensors: dict, options: dict) -> str | None:
    floats = unsupported_dtype(*(tensors[name] for name in ("x", "down", "up", "inject")))
    return unsupported_n(tensors["x"].shape[-2]) or floats


def forward(
    x: Tensor, gamma: Tensor, down: Tensor, up: Tensor, inject: Tensor | None, *, rms_eps: float, post_mult: float
) -> tuple[Tensor, ...]:
    flat, scale = streams(x), gamma.reshape(-1).contiguous()
    T, n, D = flat.shape
    batch, rank = x.shape[:-2], down.shape[0]
    inv_rms = stage("inv_rms", shaped(inverse_rms(flat, rms_eps), (*batch, n)))
    r, weights = inv_rms.reshape(T, n), _projections(down, inject) * scale
    h_mix: Tensor | None = None
    for i in range(n):
        h_mix = product(flat[:, i], weights[:, i * D : (i + 1) * D].T, scale=r[:, i], addend=h_mix)
    h_mix = stage("h_mix", shaped(h_mix, (*batch, h_mix.shape[1])))
    hidden = stage("hidden", torch.nn.functional.silu(h_mix[..., :rank] / n))
    h_post = stage("h_post", post_mult * torch.sigmoid(h_mix[..., rank:] / n))
    h_in = gated_mean(flat, r, scale, hidden.reshape(T, rank), up.contiguous())
    return stage("h_in", shaped(h_in, (*batch, D))), h_post, inv_rms, h_mix


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, gamma, down, up, inject = (tensors[name] for name in ("x", "gamma", "down", "up", "inject"))
    flat, scale, rank = streams(x), gamma.reshape(-1).contiguous(), down.shape[0]
    T, n, D = flat.shape
    r, h_mix = tensors["inv_rms"].reshape(T, n), tensors["h_mix"].reshape(T, tensors["h_mix"].shape[-1])
    weights, s = _projections(down, inject), h_mix[:, :rank] / n
    hidden = torch.nn.functional.silu(s)
    u = flat.new_zeros((T, D)) if grads["h_in"] is None else rows(grads["h_in"])
    dgates, dy = gates_backward(flat, r, scale, hidden, up.contiguous(), u)
    dgates = stage("dgates", shaped(dgates, (*x.shape[:-2], n * D))).reshape(T, n * D)
    dhidden = stage("dhidden", shaped(product(dgates, up), (*x.shape[:-2], rank))).reshape(T, rank)
    sigmoid, injection = torch.sigmoid(s), torch.sigmoid(h_mix[:, rank:] / n)
    ds = dhidden * sigmoid * (1 + s * (1 - sigmoid))
    dq = options["post_mult"] * injection * (1 - injection)
    dq = torch.zeros_like(dq) if grads["h_post"] is None else dq * grads["h_post"].reshape(dq.shape)
    dm = stage("dm", shaped(torch.cat([ds, dq], -1) / n, (*x.shape[:-2], h_mix.shape[1]))).reshape(h_mix.shape)
    dy = product(dm, weights, addend=dy)
    dy = stage("dnormed", shaped(dy, x.shape)).reshape(T, n * D)
    by_stream = [product((dm * r[:, i : i + 1]).T, flat[:, i]) for i in range(n)]
    dweights = torch.cat(by_stream, -1) * scale
    gradients = {
        "x": norm_backward(flat, r, scale, dy),
        "gamma": gamma_gradient(flat, r, dy),
        "down": dweights[:rank],
        "up": product(dgates.T, hidden),
    }
    if inject is not None:
        gradients["inject"] = dweights[rank:]
    return {
        name: stage(f"d{name}", shaped(grad.to(tensors[name].dtype), tensors[name].shape))
        for name, grad in gradients.items()
    }


def _projections(down: Tensor, inject: Tensor | None) -> Tensor:
    """down and inject as one float32 matrix, [rank (+ n), n*dim]"""
    return down.float() if inject is None else torch.cat([down.float(), inject.float()])
