"""y[t] = sum over experts e that chose t of p[t, e] x[t] w[e]: each expert takes the tokens that want it most.

p is a softmax over experts, and each expert chooses `capacity` tokens by it. A token may be chosen often, or never.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 4


@assay.case(T=[16], E=[3], D=[5], F=[4], capacity=[7])
def tokens(make, T, E, D, F, capacity):
    return {"x": make.normal(T, D), "logits": make.normal(T, E), "w": make.normal(E, D, F), "capacity": capacity}


@assay.case(T=[11], E=[5], D=[3], F=[6], capacity=[4])
def several(make, T, E, D, F, capacity):
    return tokens[0].draw(make, T, E, D, F, capacity)


def golden(x, logits, w, capacity):
    p = assay.stage("p", torch.softmax(logits, -1))
    chosen = assay.stage("chosen", p.topk(capacity, 0).indices)
    y = torch.zeros(len(x), w.shape[2], dtype=x.dtype)
    for e in range(len(w)):
        rows = chosen[:, e]
        y = y.index_add(0, rows, p[rows, e].unsqueeze(1) * (x[rows] @ w[e]))
    return y, chosen


def forward(x, logits, w, capacity):
    T, E = logits.shape
    e = torch.exp(logits - logits.amax(1, keepdim=True))
    p = (e / e.sum(1, keepdim=True)).contiguous()
    chosen = p.topk(capacity, 0).indices
    flat = p.flatten()
    y = torch.zeros(T, w.shape[2])
    for expert in range(E):
        for at in range(0, capacity, TILE):
            rows = chosen[at : at + TILE, expert]
            gate = flat[rows * E + expert]
            y.index_add_(0, rows, (x[rows] @ w[expert]) * gate.unsqueeze(1))
    return y, chosen


def backward(x, logits, w, capacity, chosen, grad_y):
    T, E = logits.shape
    p = torch.softmax(logits, 1)
    dx, dw, dp = torch.zeros(x.shape), torch.empty(w.shape), torch.zeros(T, E)
    for expert in range(E):
        rows = chosen[:, expert]
        gate = p[rows, expert].unsqueeze(1)
        back = grad_y[rows] @ w[expert].mT
        dp[rows, expert] = (back * x[rows]).sum(1)
        dx.index_add_(0, rows, gate * back)
        dw[expert] = (gate * x[rows]).mT @ grad_y[rows]
    dlogits = p * (dp - (dp * p).sum(1, keepdim=True))
    return {"x": dx, "logits": dlogits, "w": dw}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, several], name="expert_choice", outputs=("y", "chosen"), backward=backward,
        decisions={"chosen": assay.topk(scores="p", k="capacity", dim=0)},
    )  # fmt: skip
