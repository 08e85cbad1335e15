"""y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over the last axis."""

import torch

from goldsmith import assay


@assay.case(T=[6], D=[32, 45])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "b": make.normal(D), "eps": 1e-5}


cases = rows


def golden(x, w, b, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * w + b
