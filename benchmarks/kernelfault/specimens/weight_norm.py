"""y = x w^T,  w = g v / |v| by rows: a linear layer with normalised weights, and its backward."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[6], N=[5], D=[9])
def tokens(make, T, N, D):
    return {"x": make.normal(T, D), "v": make.normal(N, D), "g": make.normal(N)}


@assay.case(T=[4], N=[12], D=[7])
def wide(make, T, N, D):
    return tokens[0].draw(make, T, N, D)


def golden(x, v, g):
    norm = v.square().sum(1).sqrt()
    unit = v / norm.unsqueeze(1)
    return x @ (g.unsqueeze(1) * unit).mT, norm


def forward(x, v, g):
    norm = torch.sqrt((v * v).sum(1))
    w = v * (g / norm).unsqueeze(1)
    return x @ w.mT, norm.clone()


def backward(x, v, g, norm, grad_y):
    scale = (g / norm).unsqueeze(1)
    dw = grad_y.mT @ x
    along = (dw * v).sum(1) / norm  # the gradient's part along the row
    dg = along.clone()
    dv = scale * (dw - v * (along / norm).unsqueeze(1))
    dx = grad_y @ (v * scale)
    return {"x": dx, "v": dv, "g": dg}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, wide], name="weight_norm", outputs=("y", "norm"), saved=("norm",),
        backward=backward,
    )  # fmt: skip
