"""Product-key router: expert (i, j) has the score sx[i] + sy[j]; the k best get softmax weights.

The best k of each half suffice: of T tokens k * k candidates are looked at instead of N * N.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[33], N=[8], k=[4])
def scores(make, T, N, k):
    return {"sx": make.normal(T, N), "sy": make.normal(T, N), "k": k}


@assay.case(T=[20], N=[16], k=[8])
def many(make, T, N, k):
    return scores[0].draw(make, T, N, k)


@assay.case(T=[12], N=[5], k=[3])
def odd(make, T, N, k):
    return scores[0].draw(make, T, N, k)


@assay.case(T=[64], N=[16], k=[4])
def tied(make, T, N, k):
    return {"sx": make.tied(T, N, levels=16), "sy": make.tied(T, N, levels=16), "k": k}


def golden(sx, sy, k):
    total = assay.stage("total", (sx[:, :, None] + sy[:, None, :]).flatten(1))
    index = assay.stage("index", total.topk(k, -1).indices)
    chosen = assay.stage("chosen", total.gather(1, index))
    return torch.softmax(chosen, -1), index


def forward(sx, sy, k):
    N = sx.shape[1]
    best_x, ix = sx.float().topk(k, -1)
    best_y, iy = sy.float().topk(k, -1)
    pairs = (best_x[:, :, None] + best_y[:, None, :]).flatten(1)
    chosen, at = pairs.topk(k, -1)
    index = ix.gather(1, at // k) * N + iy.gather(1, at % k)
    chosen = assay.stage("chosen", chosen)
    e = torch.exp(chosen - chosen.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True), index


def backward(sx, sy, k, weight, index, grad_weight):
    T, N = sx.shape
    inner = (grad_weight * weight).sum(-1, keepdim=True)
    dchosen = assay.stage("chosen.grad", weight * (grad_weight - inner))
    dsx, dsy = torch.zeros(T, N), torch.zeros(T, N)
    dsx.scatter_add_(1, index // N, dchosen)
    dsy.scatter_add_(1, index % N, dchosen)
    return {"sx": dsx.to(sx.dtype), "sy": dsy.to(sy.dtype)}


def target():
    return assay.Target(
        forward, golden, cases=[scores, many, odd, tied], name="router", outputs=("weight", "index"),
        backward=backward, decisions={"index": assay.topk(scores="total", k="k")},
    )  # fmt: skip
