"""r[i, j] = |x_i - y_j|^2 + softmin(r[i-1, j-1], r[i-1, j], r[i, j-1]), loss = r at both ends: soft-DTW.

softmin(a) = -gamma log sum exp(-a / gamma). Cells are taken diagonal by diagonal, for all pairs of sequences at
once, with a border of infinity; sequences have their own lengths. Each cell keeps how much of it came each of the
three ways, and the backward goes from the last cell to the first with these shares.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(B=[3], N=[6], M=[5], D=[3])
def pairs(make, B, N, M, D):
    n, m = make.integers(2, N + 1, B), make.integers(2, M + 1, B)
    n[0], m[1] = N - 2, M - 1
    return {"x": make.normal(B, N, D), "y": make.normal(B, M, D), "n": n, "m": m, "gamma": 0.5}


@assay.case(B=[2], N=[4], M=[7], D=[2])
def short(make, B, N, M, D):
    return {**pairs[0].draw(make, B, N, M, D), "gamma": 2.0}


def golden(x, y, n, m, gamma):
    losses = []
    for b in range(len(x)):
        cost = (x[b].unsqueeze(1) - y[b]).square().sum(2)
        r = {}
        for i in range(int(n[b])):
            for j in range(int(m[b])):
                before = [r[at] for at in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if at in r]
                r[i, j] = cost[i, j]
                if before:
                    r[i, j] = cost[i, j] - gamma * torch.logsumexp(-torch.stack(before) / gamma, 0)
        losses.append(r[int(n[b]) - 1, int(m[b]) - 1])
    return torch.stack(losses)


def diagonal(d, N, M):
    """The cells (from 1) of diagonal d, rows and columns."""
    rows = torch.arange(max(1, d - M), min(N, d - 1) + 1)
    return rows, d - rows


class SoftDTW(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, n, m, gamma):
        B, N, M = len(x), x.shape[1], y.shape[1]
        cost = (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3)
        r = torch.full((B, N + 1, M + 1), math.inf)
        r[:, 0, 0] = 0
        way = torch.zeros(3, B, N + 1, M + 1)
        for d in range(2, N + M + 1):
            i, j = diagonal(d, N, M)
            a, b, c = -r[:, i - 1, j - 1] / gamma, -r[:, i - 1, j] / gamma, -r[:, i, j - 1] / gamma
            top = torch.maximum(torch.maximum(a, b), c)
            total = torch.exp(a - top) + torch.exp(b - top) + torch.exp(c - top)
            r[:, i, j] = cost[:, i - 1, j - 1] - gamma * (top + torch.log(total))
            way[:, :, i, j] = torch.stack([torch.exp(a - top), torch.exp(b - top), torch.exp(c - top)]) / total
        ctx.save_for_backward(x, y, n, m, way)
        return r[torch.arange(B), n, m]

    @staticmethod
    def backward(ctx, g):
        x, y, n, m, way = ctx.saved_tensors
        B, N, M = len(x), x.shape[1], y.shape[1]
        share = torch.zeros(B, N + 2, M + 2)
        for b in range(B):
            rows, columns = int(n[b]), int(m[b])
            for i in reversed(range(1, rows + 1)):
                for j in reversed(range(1, columns + 1)):
                    if i == rows and j == columns:
                        share[b, i, j] = g[b]
                        continue
                    for step, (down, right) in enumerate(((1, 1), (1, 0), (0, 1))):
                        k, l = i + down, j + right
                        if k <= rows and l <= columns:
                            share[b, i, j] += share[b, k, l] * way[step, b, k, l]
        e = share[:, 1:-1, 1:-1]
        dx, dy = torch.zeros(x.shape), torch.zeros(y.shape)
        for j in range(M):
            apart = 2 * e[:, :, j].unsqueeze(2) * (x - y[:, j].unsqueeze(1))
            dx += apart
            dy[:, j] = -apart.sum(1)
        return dx, dy, None, None, None


def kernel(x, y, n, m, gamma):
    return SoftDTW.apply(x, y, n, m, gamma)


def target():
    return assay.Target(kernel, golden, cases=[pairs, short], name="soft_dtw", outputs=("loss",))
