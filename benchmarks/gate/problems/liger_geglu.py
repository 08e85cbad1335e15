"""y = gelu(gate) * up with the tanh form of gelu, where x holds gate and up side by side, forward only."""

import torch

from goldsmith import assay


@assay.case(T=[5, 1], D=[24, 17])
def rows(make, T, D):
    return {"x": make.normal(T, 2 * D)}


cases = rows
backward = None


def golden(x):
    gate, up = x.chunk(2, -1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up
