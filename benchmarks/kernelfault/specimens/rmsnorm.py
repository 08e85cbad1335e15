"""y = x * inv_rms * w,  inv_rms = rsqrt(mean x^2 + eps); the backward by hand from the saved inv_rms."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[13], D=[100])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


@assay.case(T=[5], D=[33])
def odd(make, T, D):
    return tokens[0].draw(make, T, D)


@assay.case(T=[24], D=[64])
def even(make, T, D):
    return tokens[0].draw(make, T, D)


def golden(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    x_hat = assay.stage("x_hat", x * inv_rms)
    return x_hat * w, inv_rms


def forward(x, w, eps):
    x32, w32 = x.float(), w.float()
    total = torch.zeros(len(x), 1)
    for start in range(0, x.shape[1], 32):
        total += x32[:, start : start + 32].square().sum(-1, keepdim=True)
    inv_rms = assay.stage("inv_rms", torch.rsqrt(total / x.shape[1] + eps))
    x_hat = assay.stage("x_hat", x32 * inv_rms)
    y = x_hat * w32
    return y.to(x.dtype), inv_rms.clone()


def backward(x, w, eps, inv_rms, grad_y):
    x32, g = x.float(), grad_y.float()
    x_hat = x32 * inv_rms
    dx_hat = assay.stage("x_hat.grad", g * w.float())
    dw = (g * x_hat).sum(0)
    mean = (dx_hat * x_hat).mean(-1, keepdim=True)
    dx = inv_rms * (dx_hat - x_hat * mean)
    return {"x": dx.to(x.dtype), "w": dw.to(w.dtype)}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, odd, even], name="rmsnorm", outputs=("y", "inv_rms"), saved=("inv_rms",),
        backward=backward,
    )  # fmt: skip
