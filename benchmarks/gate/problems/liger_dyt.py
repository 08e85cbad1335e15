"""y = tanh(alpha * x) * gamma + beta."""

import torch

from goldsmith import assay


@assay.case(T=[6, 1], D=[32, 45])
def rows(make, T, D):
    return {"x": make.normal(T, D), "alpha": make.normal(1), "gamma": make.normal(D), "beta": make.normal(D)}


cases = rows


def golden(x, alpha, gamma, beta):
    return torch.tanh(alpha * x) * gamma + beta
