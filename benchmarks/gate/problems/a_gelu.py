"""y = x * Phi(x), with the normal distribution's Phi."""

import torch

from goldsmith import assay


@assay.case(T=[5], D=[33])
def rows(make, T, D):
    return {"x": make.normal(T, D, std=2.0)}


cases = rows


def golden(x):
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))
