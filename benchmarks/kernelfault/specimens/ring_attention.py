"""softmax(q k^T / sqrt(D) below the diagonal) v with the sequence divided among ranks: ring attention.

Each rank keeps its queries; keys and values go round the ring, and what a rank finds in each block is joined with what
it has by their logsumexps. In the backward the gradients of keys and values go round with them, and come home with the
last hop. The last rank has fewer tokens.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(H=[2], T=[11], D=[4], ranks=[3])
def three(make, H, T, D, ranks):
    return {"q": make.normal(H, T, D), "k": make.normal(H, T, D), "v": make.normal(H, T, D), "ranks": ranks}


@assay.case(H=[1], T=[9], D=[5], ranks=[2])
def two(make, H, T, D, ranks):
    return three[0].draw(make, H, T, D, ranks)


def golden(q, k, v, ranks):
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def hop(blocks):
    """Every rank hands its block to the next one."""
    return blocks[-1:] + blocks[:-1]


def scored(q, k, diagonal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if diagonal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


def forward(q, k, v, ranks):
    queries = q.chunk(ranks, 1)
    held = list(zip(range(ranks), k.chunk(ranks, 1), v.chunk(ranks, 1), strict=True))
    outs, lses = [None] * ranks, [None] * ranks
    for _ in range(ranks):
        for rank in range(ranks):
            source, keys, values = held[rank]
            if source > rank:
                continue
            scores = scored(queries[rank], keys, source == rank)
            lse = torch.logsumexp(scores, -1, keepdim=True)
            out = torch.exp(scores - lse) @ values
            if outs[rank] is None:
                outs[rank], lses[rank] = out, lse
                continue
            share = torch.sigmoid(lse - lses[rank])
            outs[rank] = outs[rank] - share * (outs[rank] - out)
            lses[rank] = torch.logaddexp(lses[rank], lse)
        held = hop(held)
    return torch.cat(outs, 1), torch.cat(lses, 1).squeeze(-1)


def backward(q, k, v, ranks, y, lse, grad_y):
    scale = q.shape[-1] ** -0.5
    local = zip(q.chunk(ranks, 1), y.chunk(ranks, 1), lse.chunk(ranks, 1), grad_y.chunk(ranks, 1), strict=True)
    local = [(qs, ls.unsqueeze(-1), g, (g * ys).sum(-1, keepdim=True)) for qs, ys, ls, g in local]
    dq = [torch.zeros(qs.shape) for qs, *_ in local]
    held = list(zip(range(ranks), k.chunk(ranks, 1), v.chunk(ranks, 1), strict=True))
    sums = [(torch.zeros(keys.shape), torch.zeros(values.shape)) for _, keys, values in held]
    for step in range(ranks):
        for rank in range(ranks):
            source, keys, values = held[rank]
            if source > rank:
                continue
            qs, ls, g, delta = local[rank]
            p = torch.exp(scored(qs, keys, source == rank) - ls)
            ds = p * (g @ values.mT - delta)
            dkeys, dvalues = sums[rank]
            dq[rank] += ds @ keys * scale
            sums[rank] = (dkeys + ds.mT @ qs * scale, dvalues + p.mT @ g)
        if step < ranks - 1:
            held = hop(held)
        sums = hop(sums)
    dk, dv = (torch.cat(parts, 1) for parts in zip(*sums, strict=True))
    return {"q": torch.cat(dq, 1), "k": dk, "v": dv}


def target():
    return assay.Target(
        forward, golden, cases=[three, two], name="ring_attention", outputs=("y", "lse"), saved=("lse",),
        backward=backward,
    )  # fmt: skip
