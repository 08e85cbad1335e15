"""weight = scale s[index] / sum s[index],  s = sigmoid(logits): the k best by s + bias in the best groups of experts.

A group counts as much as its two best experts. The bias balances the experts: it has a say in who is chosen, and none
in the weights.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(T=[11], E=[12], groups=[4], keep=[2], k=[3])
def tokens(make, T, E, groups, keep, k):
    return {
        "logits": make.normal(T, E), "bias": make.normal(E) - 1, "groups": groups, "keep": keep, "k": k,
        "scale": 2.5,
    }  # fmt: skip


@assay.case(T=[6], E=[15], groups=[3], keep=[2], k=[4])
def thirds(make, T, E, groups, keep, k):
    return tokens[0].draw(make, T, E, groups, keep, k)


def golden(logits, bias, groups, keep, k, scale):
    s = assay.stage("s", torch.sigmoid(logits))
    biased = s + bias
    merit = assay.stage("merit", biased.unflatten(1, (groups, -1)).topk(2, -1).values.sum(-1))
    best = assay.stage("best", merit.topk(keep, -1).indices)
    closed = torch.ones(merit.shape, dtype=torch.bool).scatter(1, best, False)
    closed = closed.repeat_interleave(logits.shape[1] // groups, 1)
    allowed = assay.stage("allowed", biased.masked_fill(closed, -math.inf))
    index = assay.stage("index", allowed.topk(k, -1).indices)
    chosen = s.gather(1, index)
    return scale * chosen / chosen.sum(-1, keepdim=True), index


def forward(logits, bias, groups, keep, k, scale):
    T, E = logits.shape
    size = E // groups
    weight, index = torch.empty(T, k), torch.empty(T, k, dtype=torch.int64)
    s, merit = torch.empty(T, E), torch.empty(T, groups)
    for at in range(0, T, TILE):
        now = slice(at, min(at + TILE, T))
        s[now] = torch.sigmoid(logits[now])
        for group in range(groups):
            inside = s[now, group * size : (group + 1) * size] + bias[group * size : (group + 1) * size]
            merit[now, group] = inside.topk(2, 1).values.sum(1)
    s, merit = assay.stage("s", s), assay.stage("merit", merit)
    best = assay.stage("best", merit.topk(keep, -1).indices)
    allowed = torch.full((T, E), -math.inf)
    for slot in range(keep):
        experts = best[:, slot].unsqueeze(1) * size + torch.arange(size)
        allowed.scatter_(1, experts, s.gather(1, experts) + bias[experts])
    allowed = assay.stage("allowed", allowed)
    for at in range(0, T, TILE):
        now = slice(at, min(at + TILE, T))
        index[now] = allowed[now].topk(k, 1).indices
        chosen = s[now].gather(1, index[now])
        weight[now] = chosen * (scale / chosen.sum(1, keepdim=True))
    return weight, index


def backward(logits, bias, groups, keep, k, scale, weight, index, grad_weight):
    s = torch.sigmoid(logits)
    chosen = s.gather(1, index)
    total = chosen.sum(1, keepdim=True)
    inner = (grad_weight * weight).sum(1, keepdim=True)
    dchosen = (scale * grad_weight - inner) / total
    ds = torch.zeros(s.shape)
    ds.scatter_(1, index, dchosen)
    return {"logits": ds * s * (1 - s)}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, thirds], name="grouped_router", outputs=("weight", "index"), backward=backward,
        grads=("logits",),
        decisions={
            "best": assay.topk(scores="merit", k="keep"), "index": assay.topk(scores="allowed", k="k"),
        },
    )  # fmt: skip
