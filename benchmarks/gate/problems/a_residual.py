"""y = x + gamma * tanh(x @ w) with a small gamma, forward only."""

import torch

from goldsmith import assay


@assay.case(T=[16, 3], D=[64])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D, D, std=0.2), "gamma": 1e-3 * make.uniform(D)}


cases = tokens
backward = None


def golden(x, w, gamma):
    return x + gamma * torch.tanh(x @ w)
