"""y = (x - mean) rstd w + b with moments over all ranks' samples, and running moments: a batch norm across ranks.

Each rank holds some of the samples, the last one fewer. Sums are joined over ranks: once for the mean, once for squared
distances from it, and once in the backward. Nothing is differentiated through the running moments.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(N=[7], C=[4], L=[5])
def samples(make, N, C, L):
    return {
        "x": make.normal(N, C, L), "w": make.normal(C), "b": make.normal(C), "running_mean": make.normal(C),
        "running_var": make.uniform(C), "momentum": 0.3, "eps": 1e-3, "ranks": 3,
    }  # fmt: skip


@assay.case(N=[5], C=[3], L=[8])
def pair(make, N, C, L):
    return {**samples[0].draw(make, N, C, L), "ranks": 2}


def golden(x, w, b, running_mean, running_var, momentum, eps, ranks):
    mean = assay.stage("mean", x.mean((0, 2)))
    var = assay.stage("var", (x - mean[:, None]).square().mean((0, 2)))
    y = (x - mean[:, None]) / torch.sqrt(var[:, None] + eps) * w[:, None] + b[:, None]
    count = x.shape[0] * x.shape[2]
    new_mean = (1 - momentum) * running_mean + momentum * mean
    new_var = (1 - momentum) * running_var + momentum * var * count / (count - 1)
    return y, new_mean, new_var, mean, torch.rsqrt(var + eps)


def all_reduce(parts):
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part
    return total


def forward(x, w, b, running_mean, running_var, momentum, eps, ranks):
    locals_ = x.chunk(ranks)
    C = x.shape[1]
    count = sum(local.shape[0] * local.shape[2] for local in locals_)
    mean = assay.stage("mean", all_reduce([local.sum((0, 2)) for local in locals_]) / count)
    squares = [(local - mean.view(1, C, 1)).square().sum((0, 2)) for local in locals_]
    var = assay.stage("var", all_reduce(squares) / count)
    rstd = torch.rsqrt(var + eps)
    y = torch.empty(x.shape)
    for local, out in zip(locals_, y.chunk(ranks), strict=True):
        out.copy_((local - mean.view(1, C, 1)) * (rstd * w).view(1, C, 1) + b.view(1, C, 1))
    new_mean = running_mean + momentum * (mean - running_mean)
    new_var = (1 - momentum) * running_var + momentum * (var * (count / (count - 1)))
    return y, new_mean, new_var, mean, rstd


def backward(x, w, b, running_mean, running_var, momentum, eps, ranks, kept_mean, kept_rstd, grad_y):
    C = x.shape[1]
    count = x.shape[0] * x.shape[2]
    locals_ = [
        ((local - kept_mean.view(1, C, 1)) * kept_rstd.view(1, C, 1), g)
        for local, g in zip(x.chunk(ranks), grad_y.chunk(ranks), strict=True)
    ]
    sums = all_reduce([g.sum((0, 2)) for _, g in locals_])
    dots = all_reduce([(g * hat).sum((0, 2)) for hat, g in locals_])
    dx = torch.empty(x.shape)
    for (hat, g), out in zip(locals_, dx.chunk(ranks), strict=True):
        centred = g - (sums / count).view(1, C, 1) - hat * (dots / count).view(1, C, 1)
        out.copy_(centred * (w * kept_rstd).view(1, C, 1))
    return {"x": dx, "w": dots, "b": sums}


def target():
    return assay.Target(
        forward, golden, cases=[samples, pair], name="sync_batchnorm",
        outputs=("y", "new_mean", "new_var", "kept_mean", "kept_rstd"),
        saved=("new_mean", "new_var", "kept_mean", "kept_rstd"), backward=backward,
        grads=("x", "w", "b"),
    )  # fmt: skip
