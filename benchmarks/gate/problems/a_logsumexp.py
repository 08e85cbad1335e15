"""y = log(sum(exp(x))) over the last axis."""

import torch

from goldsmith import assay


@assay.case(T=[5, 1], D=[40])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


cases = rows


def golden(x):
    top = x.amax(-1, keepdim=True)
    return (top + torch.log(torch.exp(x - top).sum(-1, keepdim=True)))[..., 0]
