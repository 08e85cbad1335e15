"""y = (x - mean) * rstd * w + b; mean and rstd saved, every gradient by hand."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[9], D=[70])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "b": make.normal(D), "eps": 1e-5}


@assay.case(T=[4], D=[129])
def odd(make, T, D):
    return tokens[0].draw(make, T, D)


@assay.case(T=[30], D=[16])
def narrow(make, T, D):
    return tokens[0].draw(make, T, D)


def golden(x, w, b, eps):
    mean = assay.stage("mean", x.mean(-1, keepdim=True))
    centred = x - mean
    rstd = assay.stage("rstd", torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps))
    x_hat = assay.stage("x_hat", centred * rstd)
    return x_hat * w + b, mean, rstd


def forward(x, w, b, eps):
    D = x.shape[1]
    mean = assay.stage("mean", x.sum(-1, keepdim=True) / D)
    centred = x - mean
    rstd = assay.stage("rstd", (centred.pow(2).sum(-1, keepdim=True) / D + eps).rsqrt())
    x_hat = assay.stage("x_hat", centred * rstd)
    return torch.addcmul(b, x_hat, w), mean.clone(), rstd.clone()


def backward(x, w, b, eps, mean, rstd, grad_y):
    D = x.shape[1]
    x_hat = (x - mean) * rstd
    wdy = assay.stage("x_hat.grad", grad_y * w)
    c1 = (wdy * x_hat).sum(-1, keepdim=True) / D
    c2 = wdy.sum(-1, keepdim=True) / D
    dx = (wdy - x_hat * c1 - c2) * rstd
    return {"x": dx, "w": (grad_y * x_hat).sum(0), "b": grad_y.sum(0)}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, odd, narrow], name="layernorm", outputs=("y", "mean", "rstd"),
        saved=("mean", "rstd"), backward=backward,
    )  # fmt: skip
