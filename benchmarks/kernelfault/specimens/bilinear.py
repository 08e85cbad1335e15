"""y[c, i, j] = x read between its four neighbours at (i + 1/2) H / H' - 1/2 and likewise for j; the backward scatters.

Bilinear resampling with pixels taken for areas (align_corners=False), rows first and then columns.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(C=[2], H=[5], W=[4], H2=[9], W2=[11])
def larger(make, C, H, W, H2, W2):
    return {"x": make.normal(C, H, W), "H2": H2, "W2": W2}


@assay.case(C=[3], H=[7], W=[10], H2=[5], W2=[7])
def smaller(make, C, H, W, H2, W2):
    return larger[0].draw(make, C, H, W, H2, W2)


def hats(n, n2, like):
    """The share of each of n places in each of n2 ones."""
    at = ((torch.arange(n2, dtype=like.dtype) + 0.5) * (n / n2) - 0.5).clamp(0, n - 1)
    return (1 - (at.unsqueeze(1) - torch.arange(n, dtype=like.dtype)).abs()).clamp(min=0)


def golden(x, H2, W2):
    rows = assay.stage("rows", hats(x.shape[1], H2, x) @ x)
    return rows @ hats(x.shape[2], W2, x).mT


def neighbours(n, n2):
    at = ((torch.arange(n2, dtype=torch.float64) + 0.5) * (n / n2) - 0.5).clamp(min=0)
    low = at.floor().long()
    high = (low + 1).clamp(max=n - 1)
    return low, high, (at - low).float()


class Resample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, H2, W2):
        low, high, share = neighbours(x.shape[1], H2)
        share = share.unsqueeze(1)
        rows = assay.stage("rows", x[:, low] * (1 - share) + x[:, high] * share)
        left, right, part = neighbours(x.shape[2], W2)
        ctx.shape = x.shape
        return rows[:, :, left] + (rows[:, :, right] - rows[:, :, left]) * part

    @staticmethod
    def backward(ctx, g):
        C, H, W = ctx.shape
        low, high, share = neighbours(H, g.shape[1])
        left, right, part = neighbours(W, g.shape[2])
        drows = torch.zeros(C, g.shape[1], W)
        drows.index_add_(2, left, g * (1 - part))
        drows.index_add_(2, right, g * part)
        drows = assay.stage("rows.grad", drows)
        dx = torch.zeros(C, H, W)
        dx.index_add_(1, low, drows * (1 - share).unsqueeze(1))
        dx.index_add_(1, high, drows * share.unsqueeze(1))
        return dx, None, None


def kernel(x, H2, W2):
    return Resample.apply(x, H2, W2)


def target():
    return assay.Target(kernel, golden, cases=[larger, smaller], name="bilinear")
