"""Rotary embedding: the pair (x[i], x[i + D/2]) of each head turns by the angle of its position.

The angles want no gradient.
"""

import torch

from goldsmith import assay


@assay.case(T=[6, 1], H=[2], half=[8, 5])
def tokens(make, T, H, half):
    angle = make.uniform(T, half) * 6.28
    return {"x": make.normal(T, H, 2 * half), "cos": angle.cos(), "sin": angle.sin()}


cases = tokens
grads = ("x",)


def golden(x, cos, sin):
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
