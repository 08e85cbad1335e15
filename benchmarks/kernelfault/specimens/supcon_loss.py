"""The supervised contrastive loss of embeddings: each anchor's positives against all others, in tiles, rows online.

z = x rsqrt(|x|^2 + eps), loss = mean over anchors with positives of lse over others (z z^T / tau) - mean over positives
of it. Running maxima and sums lie in a workspace that is kept between calls. The backward forms each tile again and
gives its slopes to both of its sides, then goes through the norm.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE, EPS = 4, 1e-6
WORK: dict[int, torch.Tensor] = {}


@assay.case(N=[10], D=[5])
def batch(make, N, D):
    labels = make.integers(0, 3, N)
    labels[:2], labels[N - 1] = 1, 7  # a pair, and one without a positive
    return {"x": make.normal(N, D), "labels": labels, "tau": 0.5}


@assay.case(N=[7], D=[8])
def small(make, N, D):
    return {**batch[0].draw(make, N, D), "tau": 0.3}


@assay.case(N=[13], D=[3])
def many(make, N, D):
    return {**batch[0].draw(make, N, D), "tau": 0.7}


def golden(x, labels, tau):
    z = assay.stage("z", x * torch.rsqrt(x.square().sum(1, keepdim=True) + EPS))
    logits = assay.stage("logits", z @ z.mT / tau)
    itself = torch.eye(len(x), dtype=torch.bool)
    lse = assay.stage("lse", torch.logsumexp(logits.masked_fill(itself, -math.inf), 1))
    positive = (labels.unsqueeze(1) == labels) & ~itself
    count = positive.sum(1)
    anchors = count > 0
    loss = assay.stage("loss", lse - torch.where(positive, logits, 0.0).sum(1) / count.clamp(min=1))
    return torch.where(anchors, loss, 0.0).sum() / anchors.sum()


def tiles(N):
    return [slice(at, min(at + TILE, N)) for at in range(0, N, TILE)]


def workspace(N):
    """Tops, sums, sums over positives and their numbers, for N rows."""
    if N not in WORK:
        WORK[N] = torch.empty(4, N)
    work = WORK[N]
    work[0], work[1:] = -math.inf, 0.0
    return work


def pairs(labels, rows, columns):
    """Which pairs of a tile are apart, and which of those have the same label."""
    at = torch.arange(len(labels))
    apart = at[rows].unsqueeze(1) != at[columns]
    return apart, apart & (labels[rows].unsqueeze(1) == labels[columns])


class SupCon(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, labels, tau):
        N = len(x)
        inv = torch.rsqrt((x * x).sum(1, keepdim=True) + EPS)
        z = assay.stage("z", x * inv)
        top, total, hits, count = workspace(N)
        for rows in tiles(N):
            for columns in tiles(N):
                apart, positive = pairs(labels, rows, columns)
                logits = z[rows] @ z[columns].mT / tau
                hits[rows] += torch.where(positive, logits, 0.0).sum(1)
                count[rows] += positive.sum(1)
                higher = torch.maximum(top[rows], logits.amax(1))
                e = torch.where(apart, torch.exp(logits - higher.unsqueeze(1)), 0.0)
                total[rows] = total[rows] * torch.exp(top[rows] - higher) + e.sum(1)
                top[rows] = higher
        lse = assay.stage("lse", top + torch.log(total))
        counted = count > 0
        weight = counted / counted.sum()
        each = count.clamp(min=1)
        ctx.save_for_backward(z, inv, labels, lse, weight, weight / each)
        ctx.tau = tau
        return (weight * (lse - hits / each)).sum()

    @staticmethod
    def backward(ctx, g):
        z, inv, labels, lse, weight, share = ctx.saved_tensors
        dz = torch.zeros(z.shape)
        for rows in tiles(len(z)):
            for columns in tiles(len(z)):
                apart, positive = pairs(labels, rows, columns)
                p = torch.exp(z[rows] @ z[columns].mT / ctx.tau - lse[rows].unsqueeze(1))
                slope = torch.where(apart, p, 0.0) * weight[rows].unsqueeze(1)
                slope -= torch.where(positive, share[rows].unsqueeze(1), 0.0)
                dz[rows] += slope @ z[columns]
                dz[columns] += slope.mT @ z[rows]
        dz *= g / ctx.tau
        return inv * (dz - z * (dz * z).sum(1, keepdim=True)), None, None


def kernel(x, labels, tau):
    return SupCon.apply(x, labels, tau)


def target():
    return assay.Target(kernel, golden, cases=[batch, small, many], name="supcon_loss", outputs=("loss_mean",))
