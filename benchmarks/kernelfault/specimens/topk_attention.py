"""y = softmax(q k[index]^T / sqrt(D)) v[index]: each query attends to the K keys that a small indexer has scored best.

Merits a b^T come in tiles of keys, and the best so far are merged with each tile's. All heads have the same keys. The
backward adds into the gradients of keys and values by index; the indexer has none.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(T=[6], S=[11], H=[2], D=[4], E=[3], K=[4])
def queries(make, T, S, H, D, E, K):
    return {
        "q": make.normal(T, H, D), "k": make.normal(S, H, D), "v": make.normal(S, H, D), "a": make.normal(T, E),
        "b": make.normal(S, E), "K": K,
    }  # fmt: skip


@assay.case(T=[4], S=[9], H=[3], D=[5], E=[2], K=[3])
def few(make, T, S, H, D, E, K):
    return queries[0].draw(make, T, S, H, D, E, K)


def golden(q, k, v, a, b, K):
    merit = assay.stage("merit", a @ b.mT)
    index = assay.stage("index", merit.topk(K, -1).indices)
    scores = assay.stage("scores", torch.einsum("thd,tjhd->thj", q, k[index]) / math.sqrt(q.shape[2]))
    p = assay.stage("p", torch.softmax(scores, -1))
    return torch.einsum("thj,tjhd->thd", p, v[index]), index, torch.logsumexp(scores, -1)


def forward(q, k, v, a, b, K):
    T, S = len(q), len(k)
    merit = torch.empty(T, S)
    best, index = torch.full((T, K), -math.inf), torch.zeros(T, K, dtype=torch.int64)
    for at in range(0, S, TILE):
        tile = a @ b[at : at + TILE].mT
        merit[:, at : at + TILE] = tile
        place = torch.arange(tile.shape[1]).expand(T, -1) + at
        both, places = torch.cat([best, tile], 1), torch.cat([index, place], 1)
        best, chosen = both.topk(K, 1)
        index = places.gather(1, chosen)
    merit, index = assay.stage("merit", merit), assay.stage("index", index)
    scores = assay.stage("scores", torch.einsum("thd,tjhd->thj", q, k[index]) * q.shape[2] ** -0.5)
    top = scores.amax(2, keepdim=True)
    e = torch.exp(scores - top)
    total = e.sum(2, keepdim=True)
    p = assay.stage("p", e / total)
    y = torch.einsum("thj,tjhd->thd", p, v[index])
    return y, index, (top + torch.log(total)).squeeze(2)


def backward(q, k, v, a, b, K, y, index, lse, grad_y):
    scale = q.shape[2] ** -0.5
    dq, dk, dv = torch.empty(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    delta = (grad_y * y).sum(2, keepdim=True)
    for t in range(len(q)):
        keys = k[index[t]].transpose(0, 1)
        p = torch.exp((keys @ q[t].unsqueeze(2)).squeeze(2) * scale - lse[t].unsqueeze(1))
        dp = torch.einsum("hd,jhd->hj", grad_y[t], v[index[t]])
        ds = p * (dp - delta[t]) * scale
        dq[t] = (ds.unsqueeze(1) @ keys).squeeze(1)
        dk.index_add_(0, index[t], ds.mT.unsqueeze(2) * q[t])
        dv.index_add_(0, index[t], p.mT.unsqueeze(2) * grad_y[t])
    return {"q": dq, "k": dk, "v": dv}


def target():
    return assay.Target(
        forward, golden, cases=[queries, few], name="topk_attention", outputs=("y", "index", "lse"), saved=("lse",),
        backward=backward, grads=("q", "k", "v"), decisions={"index": assay.topk(scores="merit", k="K")},
    )  # fmt: skip
