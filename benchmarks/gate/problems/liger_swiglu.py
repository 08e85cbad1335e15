"""y = silu(gate) * up, where x holds gate and up side by side, forward only."""

import torch

from goldsmith import assay


@assay.case(T=[5, 1], D=[24, 17])
def rows(make, T, D):
    return {"x": make.normal(T, 2 * D)}


cases = rows
backward = None


def golden(x):
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up
