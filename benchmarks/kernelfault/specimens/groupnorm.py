"""y = (x - mean_g) * rstd_g * w + b over groups of channels and all positions; through an autograd.Function."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(B=[3], C=[12], L=[9], G=[4])
def maps(make, B, C, L, G):
    return {"x": make.normal(B, C, L), "w": make.normal(C), "b": make.normal(C), "G": G, "eps": 1e-5}


@assay.case(B=[2], C=[6], L=[25], G=[3])
def long(make, B, C, L, G):
    return maps[0].draw(make, B, C, L, G)


@assay.case(B=[5], C=[16], L=[4], G=[2])
def wide(make, B, C, L, G):
    return maps[0].draw(make, B, C, L, G)


def golden(x, w, b, G, eps):
    B, C, L = x.shape
    grouped = x.reshape(B, G, C // G, L)
    mean = assay.stage("mean", grouped.mean((2, 3), keepdim=True))
    var = assay.stage("var", (grouped - mean).square().mean((2, 3), keepdim=True))
    x_hat = assay.stage("x_hat", ((grouped - mean) * torch.rsqrt(var + eps)).reshape(B, C, L))
    return x_hat * w.view(C, 1) + b.view(C, 1)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, G, eps):
        B, C, L = x.shape
        n = C // G * L
        rows = x.reshape(B, G, n)
        mean = assay.stage("mean", (rows.sum(-1) / n).view(B, G, 1, 1)).view(B, G, 1)
        var = ((rows - mean) ** 2).sum(-1) / n
        var = assay.stage("var", var.view(B, G, 1, 1)).view(B, G, 1)
        rstd = (var + eps).rsqrt()
        x_hat = assay.stage("x_hat", ((rows - mean) * rstd).view(B, C, L))
        ctx.save_for_backward(x_hat, rstd, w)
        ctx.G = G
        return x_hat * w.view(C, 1) + b.view(C, 1)

    @staticmethod
    def backward(ctx, g):
        x_hat, rstd, w = ctx.saved_tensors
        B, C, L = x_hat.shape
        n = C // ctx.G * L
        dw, db = (g * x_hat).sum((0, 2)), g.sum((0, 2))
        dx_hat = assay.stage("x_hat.grad", g * w.view(C, 1))
        rows, hats = dx_hat.reshape(B, ctx.G, n), x_hat.reshape(B, ctx.G, n)
        inner = (rows * hats).sum(-1, keepdim=True) / n
        dx = (rows - rows.sum(-1, keepdim=True) / n - hats * inner) * rstd
        return dx.view(B, C, L), dw, db, None, None


def kernel(x, w, b, G, eps):
    return Norm.apply(x, w, b, G, eps)


def target():
    return assay.Target(kernel, golden, cases=[maps, long, wide], name="groupnorm")
