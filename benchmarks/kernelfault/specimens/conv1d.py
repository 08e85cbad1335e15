"""Causal depthwise convolution: y[t, d] = sum_j w[d, j] x[t - K + 1 + j, d] + b[d]; the backward by hand."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[20], D=[9], K=[4])
def tokens(make, T, D, K):
    return {"x": make.normal(T, D), "w": make.normal(D, K), "b": make.normal(D)}


@assay.case(T=[11], D=[16], K=[3])
def short(make, T, D, K):
    return tokens[0].draw(make, T, D, K)


@assay.case(T=[35], D=[5], K=[5])
def long(make, T, D, K):
    return tokens[0].draw(make, T, D, K)


def golden(x, w, b):
    K = w.shape[1]
    padded = torch.cat([torch.zeros(K - 1, x.shape[1], dtype=x.dtype), x])
    windows = padded.unfold(0, K, 1)
    conv = assay.stage("conv", (windows * w).sum(-1))
    return torch.nn.functional.silu(conv + b)


def forward(x, w, b):
    T, K = len(x), w.shape[1]
    conv = torch.zeros(x.shape)
    for j in range(K):
        lag = K - 1 - j
        conv[lag:] += x[: T - lag] * w[:, j]
    conv = assay.stage("conv", conv)
    h = conv + b
    return h * torch.sigmoid(h)


def backward(x, w, b, grad_y):
    T, K = len(x), w.shape[1]
    h = b.expand(x.shape).clone()
    for j in range(K):
        h[K - 1 - j :] += x[: T - (K - 1 - j)] * w[:, j]
    s = torch.sigmoid(h)
    dconv = assay.stage("conv.grad", grad_y * s * (1 + h * (1 - s)))
    dx, dw = torch.zeros(x.shape), torch.empty(w.shape)
    for j in range(K):
        lag = K - 1 - j
        dx[: T - lag] += dconv[lag:] * w[:, j]
        dw[:, j] = (dconv[lag:] * x[: T - lag]).sum(0)
    return {"x": dx, "w": dw, "b": dconv.sum(0)}


def target():
    return assay.Target(forward, golden, cases=[tokens, short, long], name="conv1d", outputs=("y",), backward=backward)
