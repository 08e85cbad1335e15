"""mean over sequences of the mean over their completion of -min(r A, clip(r) A) + beta kl: GRPO's loss by tokens.

r = exp(logp - old), kl = exp(ref - logp) - (ref - logp) - 1, and A is a sequence's reward less its group's mean,
over its group's deviation; groups are G sequences that follow each other. A completion goes from start to end
(which may be equal) in rows of T tokens. Programs go over a sequence's tokens in tiles.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 4


@assay.case(B=[4], T=[11], G=[2])
def rollouts(make, B, T, G):
    start = make.integers(0, T // 2, B)
    end = torch.maximum(start + 3, make.integers(T // 2, T + 1, B))
    end[1], end[2] = start[1], T - 2
    logp = 0.3 * make.normal(B, T)
    return {
        "logp": logp, "old": 0.3 * make.normal(B, T), "ref": 0.3 * make.normal(B, T), "reward": make.normal(B),
        "start": start, "end": end, "G": G, "low": 0.2, "high": 0.28, "beta": 0.04,
    }  # fmt: skip


@assay.case(B=[6], T=[7], G=[3])
def short(make, B, T, G):
    return {**rollouts[0].draw(make, B, T, G), "low": 0.1, "high": 0.1, "beta": 0.3}


def golden(logp, old, ref, reward, start, end, G, low, high, beta):
    r = reward.view(-1, G)
    deviation = (r - r.mean(1, keepdim=True)).square().sum(1, keepdim=True).div(G - 1).sqrt()
    A = assay.stage("advantage", ((r - r.mean(1, keepdim=True)) / (deviation + 1e-4)).flatten()).unsqueeze(1)
    ratio = torch.exp(logp - old)
    policy = -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    each = assay.stage("each", policy + beta * (torch.exp(ref - logp) - (ref - logp) - 1))
    t = torch.arange(logp.shape[1])
    own = (t >= start.unsqueeze(1)) & (t < end.unsqueeze(1))
    return (torch.where(own, each, 0.0).sum(1) / (end - start).clamp(min=1)).mean()


def advantages(reward, G):
    A = torch.empty(len(reward))
    for at in range(0, len(reward), G):
        r = reward[at : at + G]
        centred = r - r.sum() / G
        A[at : at + G] = centred / (torch.sqrt(centred.square().sum() / (G - 1)) + 1e-4)
    return A


def tiles(T):
    return [torch.arange(at, min(at + TILE, T)) for at in range(0, T, TILE)]


class GRPO(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, old, ref, reward, start, end, G, low, high, beta):
        B, T = logp.shape
        A = assay.stage("advantage", advantages(reward, G))
        each, part = torch.empty(B, T), torch.zeros(B)
        for b in range(B):
            for t in tiles(T):
                ratio = torch.exp(logp[b, t] - old[b, t])
                policy = torch.minimum(ratio * A[b], torch.clamp(ratio, 1 - low, 1 + high) * A[b])
                apart = ref[b, t] - logp[b, t]
                each[b, t] = beta * (torch.exp(apart) - apart - 1) - policy
        each = assay.stage("each", each)
        count = (end - start).clamp(min=1)
        for b in range(B):
            for t in tiles(T):
                own = (t >= start[b]) & (t < end[b])
                part[b] += torch.where(own, each[b, t], 0.0).sum()
        ctx.save_for_backward(logp, old, ref, A, start, end, count)
        ctx.low, ctx.high, ctx.beta = low, high, beta
        return (part / count).sum() / B

    @staticmethod
    def backward(ctx, g):
        logp, old, ref, A, start, end, count = ctx.saved_tensors
        B, T = logp.shape
        grad = torch.empty(B, T)
        for b in range(B):
            rate = g / (B * count[b])
            for t in tiles(T):
                ratio = torch.exp(logp[b, t] - old[b, t])
                clipped = ratio * A[b] > torch.clamp(ratio, 1 - ctx.low, 1 + ctx.high) * A[b]
                slope = torch.where(clipped, 0.0, -ratio * A[b])
                slope = slope + ctx.beta * (1 - torch.exp(ref[b, t] - logp[b, t]))
                own = (t >= start[b]) & (t < end[b])
                grad[b, t] = torch.where(own, rate * slope, 0.0)
        return (grad,) + (None,) * 9


def kernel(logp, old, ref, reward, start, end, G, low, high, beta):
    return GRPO.apply(logp, old, ref, reward, start, end, G, low, high, beta)


def target():
    return assay.Target(
        kernel, golden, cases=[rollouts, short], name="grpo_loss", outputs=("loss",), grads=("logp",)
    )  # fmt: skip
