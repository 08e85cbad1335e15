"""loss = mean of 0.5 d^2 where |d| < 1, and of |d| - 0.5 elsewhere, with d = x - y."""

import torch

from goldsmith import assay


@assay.case(T=[9], D=[8, 1])
def rows(make, T, D):
    return {"x": make.normal(T, D, std=1.5), "y": make.normal(T, D)}


cases = rows


def golden(x, y):
    d = (x - y).abs()
    return torch.where(d < 1, 0.5 * d * d, d - 0.5).mean()
