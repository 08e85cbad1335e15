"""y[t] = x[t] + [t is among the k best] sigmoid(x[t] w_route) silu(x[t] w1) w2: a mixture of depths.

In each sequence the k tokens with the largest scores go through the block, in the order of their positions; the others
are passed on. Rows of all sequences are gathered into one dense matrix, and what comes out is added to their places.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(B=[2], T=[7], D=[5], F=[6], k=[3])
def tokens(make, B, T, D, F, k):
    return {
        "x": make.normal(B, T, D), "route": make.normal(D), "w1": make.normal(D, F, std=D**-0.5),
        "w2": make.normal(F, D, std=F**-0.5), "k": k,
    }  # fmt: skip


@assay.case(B=[3], T=[5], D=[4], F=[9], k=[2])
def few(make, B, T, D, F, k):
    return tokens[0].draw(make, B, T, D, F, k)


def golden(x, route, w1, w2, k):
    score = assay.stage("score", x @ route)
    index = assay.stage("index", score.topk(k, -1).indices.sort(-1).values)
    places = index.unsqueeze(-1).expand(-1, -1, x.shape[2])
    h = x.gather(1, places)  # the gate is of these rows alone: a token that is not chosen has no part in any gradient
    gate = assay.stage("gate", torch.sigmoid(h @ route))
    z = assay.stage("z", h @ w1)
    u = z * torch.sigmoid(z) @ w2
    return x.scatter_add(1, places, gate.unsqueeze(-1) * u), index


def forward(x, route, w1, w2, k):
    B, T, D = x.shape
    score = assay.stage("score", x @ route)
    index = assay.stage("index", score.topk(k, -1).indices.sort(-1).values)
    gate = assay.stage("gate", torch.sigmoid(score.gather(1, index)))
    flat = (index + torch.arange(B).unsqueeze(1) * T).flatten()
    h = x.reshape(B * T, D)[flat]
    z = assay.stage("z", (h @ w1).view(B, k, -1)).flatten(0, 1)
    u = (z * torch.sigmoid(z)) @ w2
    y = x.reshape(B * T, D).clone()
    y.index_add_(0, flat, gate.reshape(-1, 1) * u)
    return y.view(B, T, D), index


def backward(x, route, w1, w2, k, y, index, grad_y):
    B, T, D = x.shape
    flat = (index + T * torch.arange(B).unsqueeze(1)).flatten()
    h = x.reshape(B * T, D)[flat]
    gate = torch.sigmoid(h @ route).unsqueeze(1)
    z = h @ w1
    s = torch.sigmoid(z)
    a = z * s
    dx = grad_y.reshape(B * T, D).clone()
    g = dx[flat]
    du = gate * g
    dscore = (g * (a @ w2)).sum(1, keepdim=True) * gate * (1 - gate)
    dz = (du @ w2.mT) * (s + a * (1 - s))
    dx.index_add_(0, flat, dz @ w1.mT + dscore * route)
    return {"x": dx.view(B, T, D), "route": h.mT @ dscore.squeeze(1), "w1": h.mT @ dz, "w2": a.mT @ du}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, few], name="depth_gather", outputs=("y", "index"), backward=backward,
        decisions={"index": assay.topk(scores="score", k="k", ordered=False)},
    )  # fmt: skip
