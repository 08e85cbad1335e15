"""y = relu(z - tau) with z = scale x and tau such that a row of y sums to 1: sparsemax, by tiles of rows.

Of a row in falling order s the support is the k numbers with 1 + j s_j > s_1 + ... + s_j, and tau their sum less
one, divided by k. The gradient goes to the support alone, less its mean there.
"""

from __future__ import annotations

import torch

from goldsmith import assay

ROWS = 4


@assay.case(N=[10], D=[9])
def rows(make, N, D):
    return {"x": make.normal(N, D), "scale": 0.7}


@assay.case(N=[3], D=[17])
def wide(make, N, D):
    return {"x": make.normal(N, D), "scale": 1.6}


def golden(x, scale):
    z = scale * x
    s = z.sort(-1, descending=True).values
    total = s.cumsum(-1)
    k = (1 + torch.arange(1, x.shape[1] + 1) * s > total).sum(-1, keepdim=True).clamp(min=1)
    tau = assay.stage("tau", (total.gather(1, k - 1) - 1) / k)
    return torch.relu(z - tau)


class Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        N, D = x.shape
        y, tau = torch.empty(N, D), torch.empty(N, 1)
        places = torch.arange(1, D + 1)
        for at in range(0, N, ROWS):
            z = scale * x[at : at + ROWS]
            s = torch.sort(z, 1, descending=True).values
            total = torch.cumsum(s, 1)
            k = (1 + places * s > total).sum(1, keepdim=True).clamp(min=1)
            tau[at : at + ROWS] = (total.gather(1, k - 1) - 1) / k
        tau = assay.stage("tau", tau)
        for at in range(0, N, ROWS):
            y[at : at + ROWS] = torch.relu(scale * x[at : at + ROWS] - tau[at : at + ROWS])
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        dx = torch.empty(y.shape)
        for at in range(0, len(y), ROWS):
            support = y[at : at + ROWS] > 0
            kept = torch.where(support, g[at : at + ROWS], 0.0)
            mean = kept.sum(1, keepdim=True) / support.sum(1, keepdim=True)
            dx[at : at + ROWS] = torch.where(support, ctx.scale * (kept - mean), 0.0)
        return dx, None


def kernel(x, scale):
    return Sparsemax.apply(x, scale)


def target():
    return assay.Target(kernel, golden, cases=[rows, wide], name="sparsemax", outputs=("y",))
