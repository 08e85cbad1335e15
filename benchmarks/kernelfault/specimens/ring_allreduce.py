"""y[r] = scale sum_q x[q] for every rank r: a ring's reduce-scatter and all-gather in chunks, and the same backward.

Ranks are the rows of one tensor. A rank sends a chunk to its neighbour in every step; the last chunk may be shorter.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(R=[4], N=[22])
def ranks(make, R, N):
    return {"x": make.normal(R, N), "scale": 0.5}


@assay.case(R=[3], N=[31])
def three(make, R, N):
    return ranks[0].draw(make, R, N)


def golden(x, scale):
    return (x.sum(0, keepdim=True) * scale).expand(x.shape).clone()


def reduced(x):
    """Every rank's sum over ranks."""
    R, N = x.shape
    width = -(-N // R)
    chunks = [slice(min(i * width, N), min((i + 1) * width, N)) for i in range(R)]
    held = [row.clone() for row in x]
    for step in range(R - 1):  # afterwards rank r holds the whole sum of chunk r + 1
        sent = [held[r][chunks[(r - step) % R]].clone() for r in range(R)]
        for r in range(R):
            held[(r + 1) % R][chunks[(r - step) % R]] += sent[r]
    for step in range(R - 1):
        whole = [held[r][chunks[(r + 1 - step) % R]].clone() for r in range(R)]
        for r in range(R):
            held[(r + 1) % R][chunks[(r + 1 - step) % R]] = whole[r]
    return torch.stack(held)


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return reduced(x) * scale

    @staticmethod
    def backward(ctx, g):
        return reduced(g) * ctx.scale, None


def kernel(x, scale):
    return AllReduce.apply(x, scale)


def target():
    return assay.Target(kernel, golden, cases=[ranks, three], name="ring_allreduce")
