"""y = x / sqrt(mean(x^2) + eps) * w over the last axis, forward only."""

import torch

from goldsmith import assay


@assay.case(T=[16, 5], D=[64, 40])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-5}


cases = rows
backward = None


def golden(x, w, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
