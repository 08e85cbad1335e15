"""One step of a beam search: the K best of all beams' continuations by their length-penalised log probability.

rank = (total + logp) / ((5 + length) / 6)^alpha, length with the new token. A beam that is done goes on with the end
token alone, for nothing, and grows no longer. The vocabulary goes in tiles, first for the logsumexp, then for the K
best so far.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(B=[3], K=[3], V=[9])
def batch(make, B, K, V):
    done = torch.zeros(B, K, dtype=torch.bool)
    done[0, 1] = done[-1, K - 1] = True
    total = -2 - make.uniform(B, K)
    total[done] += 1.5
    logits, length = make.normal(B, K, V, std=2.0), make.integers(2, 30, B, K)
    logits[0, 0, V - 1] += 6
    length[done] = 20
    return {
        "logits": logits, "total": total, "length": length, "done": done, "end": 1, "alpha": 0.8, "k": K,
    }  # fmt: skip


@assay.case(B=[2], K=[4], V=[6])
def small(make, B, K, V):
    return {**batch[0].draw(make, B, K, V), "end": 5, "alpha": 1.2}


@assay.case(B=[1], K=[2], V=[21])
def one(make, B, K, V):
    return {**batch[0].draw(make, B, K, V), "end": 0}


def golden(logits, total, length, done, end, alpha, k):
    B, K, V = logits.shape
    lse = assay.stage("lse", torch.logsumexp(logits, 2))
    for_nothing = torch.full((V,), -math.inf, dtype=logits.dtype)
    for_nothing[end] = 0.0
    step = torch.where(done.unsqueeze(2), for_nothing, logits - lse.unsqueeze(2))
    sums = total.unsqueeze(2) + step
    penalty = ((6.0 + length - done.long()) / 6) ** alpha
    rank = assay.stage("rank", (sums / penalty.unsqueeze(2)).flatten(1))
    index = assay.stage("index", rank.topk(k, 1).indices)
    return sums.flatten(1).gather(1, index), index


def forward(logits, total, length, done, end, alpha, k):
    B, K, V = logits.shape
    top, rest = torch.full((B, K), -math.inf), torch.zeros(B, K)
    for v in range(0, V, TILE):
        part = logits[:, :, v : v + TILE]
        higher = torch.maximum(top, part.amax(2))
        rest = rest * torch.exp(top - higher) + torch.exp(part - higher.unsqueeze(2)).sum(2)
        top = higher
    lse = assay.stage("lse", top + torch.log(rest))
    penalty = ((length + torch.where(done, 0, 1) + 5.0) / 6) ** alpha
    best, index = torch.empty(B, 0), torch.empty(B, 0, dtype=torch.int64)
    for v in range(0, V, TILE):
        part = logits[:, :, v : v + TILE]
        token = torch.arange(v, v + part.shape[2])
        step = torch.where(done.unsqueeze(2), torch.where(token == end, 0.0, -math.inf), part - lse.unsqueeze(2))
        rank = (total.unsqueeze(2) + step) / penalty.unsqueeze(2)
        here = (torch.arange(K).unsqueeze(1) * V + token).flatten().expand(B, -1)
        best, index = torch.cat([best, rank.flatten(1)], 1), torch.cat([index, here], 1)
        best, chosen = best.topk(min(k, best.shape[1]), 1)
        index = index.gather(1, chosen)
    index = assay.stage("index", index)
    beam = index // V
    step = logits.reshape(B, -1).gather(1, index) - lse.gather(1, beam)
    ended = torch.where(index % V == end, 0.0, -math.inf)
    return total.gather(1, beam) + torch.where(done.gather(1, beam), ended, step), index


def target():
    return assay.Target(
        forward, golden, cases=[batch, small, one], name="beam_step", outputs=("score", "index"), backward=None,
        decisions={"index": assay.topk(scores="rank", k="k")},
    )  # fmt: skip
