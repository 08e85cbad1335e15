"""y = softmax(x) over the last axis."""

import torch

from goldsmith import assay


@assay.case(T=[6, 1], D=[45, 8])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


cases = rows


def golden(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)
