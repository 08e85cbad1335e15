"""y[c] = sum_ab w[c, a, b] x[c, i + a - p, j + b - p] + bias[c], x reflected at its borders; every gradient by hand.

A depthwise convolution in two dimensions. Reflection shows inner rows twice: their gradients come back from two places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from goldsmith import assay


@assay.case(C=[3], H=[6], W=[8], K=[3])
def maps(make, C, H, W, K):
    return {"x": make.normal(C, H, W), "w": make.normal(C, K, K), "bias": make.normal(C)}


@assay.case(C=[2], H=[7], W=[5], K=[5])
def broad(make, C, H, W, K):
    return maps[0].draw(make, C, H, W, K)


def golden(x, w, bias):
    p = w.shape[1] // 2
    padded = F.pad(x, (p, p, p, p), mode="reflect")
    windows = padded.unfold(1, w.shape[1], 1).unfold(2, w.shape[2], 1)
    return torch.einsum("chwab,cab->chw", windows, w) + bias[:, None, None]


def reflected(n, p):
    """The places of x that a padded axis shows."""
    place = torch.arange(-p, n + p).abs()
    return torch.where(place < n, place, 2 * (n - 1) - place)


def forward(x, w, bias):
    (C, H, W), K = x.shape, w.shape[1]
    padded = x[:, reflected(H, K // 2)][:, :, reflected(W, K // 2)]
    y = bias.view(C, 1, 1).expand(C, H, W).clone()
    for a in range(K):
        for b in range(K):
            y += w[:, a, b, None, None] * padded[:, a : a + H, b : b + W]
    return y


def backward(x, w, bias, grad_y):
    (C, H, W), K = x.shape, w.shape[1]
    rows, columns = reflected(H, K // 2), reflected(W, K // 2)
    shown = x[:, rows][:, :, columns]
    dpadded, dw = torch.zeros(shown.shape), torch.empty(w.shape)
    for a in range(K):
        for b in range(K):
            dpadded[:, a : a + H, b : b + W] += grad_y * w[:, a, b].view(C, 1, 1)
            dw[:, a, b] = (grad_y * shown[:, a : a + H, b : b + W]).sum((1, 2))
    by_rows = torch.zeros(C, H, len(columns)).index_add_(1, rows, dpadded)
    dx = torch.zeros(C, H, W).index_add_(2, columns, by_rows)
    return {"x": dx, "w": dw, "bias": grad_y.sum((1, 2))}


def target():
    return assay.Target(forward, golden, cases=[maps, broad], name="reflect_conv2d", backward=backward)
