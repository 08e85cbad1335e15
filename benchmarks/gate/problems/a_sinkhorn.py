"""20 steps of Sinkhorn's iteration in logarithms, rows then columns, on n x n matrices."""

import torch

from goldsmith import assay


@assay.case(B=[4], n=[4, 3])
def matrices(make, B, n):
    return {"x": make.normal(B, n, n, std=1.5)}


cases = matrices


def golden(x):
    for _ in range(20):
        x = x - torch.logsumexp(x, -1, keepdim=True)
        x = x - torch.logsumexp(x, -2, keepdim=True)
    return x.exp()
