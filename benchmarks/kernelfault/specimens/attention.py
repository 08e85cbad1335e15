"""Causal attention with an online softmax over blocks of keys; one row of queries at a time is kept in running sums."""

from __future__ import annotations

import math

import torch

from goldsmith import assay

BLOCK = 8


@assay.case(S=[16], D=[12])
def tokens(make, S, D):
    return {"q": make.normal(S, D), "k": make.normal(S, D), "v": make.normal(S, D)}


@assay.case(S=[21], D=[8])
def odd(make, S, D):
    return tokens[0].draw(make, S, D)


@assay.case(S=[33], D=[5])
def long(make, S, D):
    return tokens[0].draw(make, S, D)


def golden(q, k, v):
    S, D = q.shape
    scores = assay.stage("scores", q @ k.mT / math.sqrt(D))
    hidden = ~torch.ones(S, S, dtype=torch.bool).tril()
    weights = assay.stage("weights", torch.softmax(scores.masked_fill(hidden, -math.inf), -1))
    return weights @ v


def forward(q, k, v):
    S, D = q.shape
    top = torch.full((S, 1), -math.inf)
    total, out = torch.zeros(S, 1), torch.zeros(S, D)
    row = torch.arange(S).unsqueeze(1)
    for start in range(0, S, BLOCK):
        column = start + torch.arange(min(BLOCK, S - start))
        scores = (q @ k[column].mT) * (1 / math.sqrt(D))
        scores = torch.where(column <= row, scores, -math.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        alpha = torch.exp(top - new)
        weights = torch.exp(scores - new)
        total = total * alpha + weights.sum(-1, keepdim=True)
        out = out * alpha + weights @ v[column]
        top = new
    return out / total


def target():
    return assay.Target(forward, golden, cases=[tokens, odd, long], name="attention", outputs=("y",), backward=None)
