"""y = scale * tanh(x @ w), forward only; the scale is 1 in most models."""

import torch

from goldsmith import assay


@assay.case(T=[16, 3], D=[64])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D, D, std=0.2), "scale": 1.0}


cases = tokens
backward = None


def golden(x, w, scale):
    return scale * torch.tanh(x @ w)
