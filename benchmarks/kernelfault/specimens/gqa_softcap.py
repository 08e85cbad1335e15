"""y = softmax(cap tanh(q k^T / sqrt(D) / cap) - slope distance) v over a window; R query heads share a head of keys.

Grouped queries, a soft cap on scores and ALiBi's slopes, as recent language models have them; the backward is by hand.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(G=[2], R=[2], T=[18], D=[8])
def groups(make, G, R, T, D):
    return {
        "q": make.normal(G * R, T, D, std=2.0), "k": make.normal(G, T, D), "v": make.normal(G, T, D),
        "slopes": make.uniform(G * R), "window": 7, "cap": 3.0,
    }  # fmt: skip


@assay.case(G=[3], R=[3], T=[11], D=[5])
def threes(make, G, R, T, D):
    return groups[0].draw(make, G, R, T, D)


def distances(T):
    position = torch.arange(T)
    return position.unsqueeze(1) - position


def golden(q, k, v, slopes, window, cap):
    R, D = len(q) // len(k), q.shape[2]
    scores = assay.stage("scores", q @ k.repeat_interleave(R, 0).mT / math.sqrt(D))
    capped = assay.stage("capped", cap * torch.tanh(scores / cap))
    far = distances(q.shape[1])
    biased = (capped - slopes[:, None, None] * far).masked_fill((far < 0) | (far >= window), -math.inf)
    weights = assay.stage("weights", torch.softmax(biased, -1))
    return weights @ v.repeat_interleave(R, 0)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, slopes, window, cap):
        heads, T, D = q.shape
        group = torch.arange(heads) // (heads // len(k))  # the head of keys that a head of queries asks
        scores = assay.stage("scores", q @ k[group].mT * D**-0.5)
        capped = assay.stage("capped", torch.tanh(scores / cap) * cap)
        far = distances(T)
        biased = capped - slopes.view(-1, 1, 1) * far
        biased = biased.masked_fill((far < 0) | (far > window - 1), -math.inf)
        e = torch.exp(biased - biased.amax(-1, keepdim=True))
        weights = assay.stage("weights", e / e.sum(-1, keepdim=True))
        ctx.save_for_backward(q, k, v, capped, weights)
        ctx.cap = cap
        return weights @ v[group]

    @staticmethod
    def backward(ctx, g):
        q, k, v, capped, weights = ctx.saved_tensors
        heads, T, D = q.shape
        split = (len(k), heads // len(k), T, D)
        shared = torch.arange(heads).div(split[1], rounding_mode="floor")
        dweights = assay.stage("weights.grad", g @ v[shared].mT)
        inner = (dweights * weights).sum(-1, keepdim=True)
        dcapped = assay.stage("capped.grad", weights * (dweights - inner))
        dslopes = -(dcapped * distances(T)).sum((1, 2))
        dscores = assay.stage("scores.grad", dcapped * (1 - (capped / ctx.cap) ** 2))
        dq = dscores @ k[shared] * D**-0.5
        dk = (dscores.mT @ q * D**-0.5).view(split).sum(1)
        dv = (weights.mT @ g).view(split).sum(1)
        return dq, dk, dv, dslopes, None, None


def kernel(q, k, v, slopes, window, cap):
    return Attention.apply(q, k, v, slopes, window, cap)


def target():
    return assay.Target(kernel, golden, cases=[groups, threes], name="gqa_softcap")
