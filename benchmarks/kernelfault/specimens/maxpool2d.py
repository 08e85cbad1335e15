"""y = the maximum of each k x k window of x, stride s, padded by p; the backward scatters to the winners' saved places.

Windows overlap where s < k: then several of them may have the same winner, and its gradients are added.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from goldsmith import assay


@assay.case(C=[3], H=[7], W=[12])
def maps(make, C, H, W):
    return {"x": make.normal(C, H, W), "k": 3, "s": 2, "p": 1}


@assay.case(C=[2], H=[6], W=[9])
def dense(make, C, H, W):
    return {"x": make.normal(C, H, W) - 1.0, "k": 3, "s": 1, "p": 1}


def golden(x, k, s, p):
    return F.max_pool2d(x, k, stride=s, padding=p)


class Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, s, p):
        C, H, W = x.shape
        rows, columns = (H + 2 * p - k) // s + 1, (W + 2 * p - k) // s + 1
        padded = F.pad(x, (p, p, p, p), value=-math.inf)
        y = torch.full((C, rows, columns), -math.inf)
        index = torch.zeros(y.shape, dtype=torch.int64)
        i, j = torch.arange(rows).unsqueeze(1) * s, torch.arange(columns) * s
        for a in range(k):
            for b in range(k):
                tap = padded[:, i + a, j + b]
                place = (i + a - p) * W + (j + b - p)
                better = (tap > y) | tap.isnan()
                y = torch.where(better, tap, y)
                index = torch.where(better, place, index)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        C, H, W = ctx.shape
        dx = torch.zeros(C, H * W)
        dx.scatter_add_(1, index.view(C, -1), g.reshape(C, -1))
        return dx.view(C, H, W), None, None, None


def kernel(x, k, s, p):
    return Pool.apply(x, k, s, p)


def target():
    return assay.Target(kernel, golden, cases=[maps, dense], name="maxpool2d")
