"""total = x + residual, and y = total / sqrt(mean(total^2) + eps) * w over the last axis."""

import torch

from goldsmith import assay


@assay.case(T=[6, 1], D=[32, 45])
def rows(make, T, D):
    return {"x": make.normal(T, D), "residual": make.normal(T, D), "w": make.normal(D), "eps": 1e-5}


cases = rows
outputs = ("y", "total")


def golden(x, residual, w, eps):
    total = x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * w, total
