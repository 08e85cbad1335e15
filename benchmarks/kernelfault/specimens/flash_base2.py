"""y = softmax(scale q k^T + causal) v in blocks of keys; log2 of the sums is saved for the backward.

As flash attention kernels do it: log2 e is folded into the scale, since exp2 is what the hardware has. Every place that
forgets which base it is in is a bug that real kernels had.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

BLOCK = 16
LOG2E = 1.4426950408889634


@assay.case(H=[2], T=[37], D=[8])
def heads(make, H, T, D):
    return {"q": make.normal(H, T, D), "k": make.normal(H, T, D), "v": make.normal(H, T, D), "scale": D**-0.5}


@assay.case(H=[1], T=[52], D=[20])
def long(make, H, T, D):
    return heads[0].draw(make, H, T, D)


def golden(q, k, v, scale):
    T = q.shape[1]
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = ((q @ k.mT) * scale).masked_fill(later, -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1) / math.log(2)


def forward(q, k, v, scale):
    H, T, D = q.shape
    y, lse = torch.empty(H, T, D), torch.empty(H, T)
    for h in range(H):
        for start in range(0, T, BLOCK):
            row = torch.arange(start, min(start + BLOCK, T))
            top, total = torch.full((len(row),), -math.inf), torch.zeros(len(row))
            out = torch.zeros(len(row), D)
            for at in range(0, start + BLOCK, BLOCK):  # blocks beyond the diagonal hold nothing that is seen
                column = torch.arange(at, min(at + BLOCK, T))
                scores = (q[h, row] @ k[h, column].mT) * (scale * LOG2E)
                scores = scores.masked_fill(column > row.unsqueeze(1), -math.inf)
                new = torch.maximum(top, scores.amax(-1))
                p = torch.exp2(scores - new.unsqueeze(1))
                alpha = torch.exp2(top - new)
                total = total * alpha + p.sum(-1)
                out = out * alpha.unsqueeze(1) + p @ v[h, column]
                top = new
            y[h, row] = out / total.unsqueeze(1)
            lse[h, row] = top + torch.log2(total)
    return y, lse


def backward(q, k, v, scale, y, lse, grad_y):
    H, T, _ = q.shape
    dq = torch.zeros(q.shape)
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    delta = (grad_y * y).sum(-1)
    for h in range(H):
        for at in range(0, T, BLOCK):
            column = torch.arange(at, min(at + BLOCK, T))
            for start in range(at, T, BLOCK):
                row = torch.arange(start, min(start + BLOCK, T))
                again = (q[h, row] @ k[h, column].mT) * (LOG2E * scale)
                p = torch.exp2(again - lse[h, row].unsqueeze(1))
                p = p.masked_fill(column > row.unsqueeze(1), 0.0)
                dp = grad_y[h, row] @ v[h, column].mT
                ds = p * (dp - delta[h, row].unsqueeze(1))
                dv[h, column] += p.mT @ grad_y[h, row]
                dq[h, row] += (ds @ k[h, column]) * scale
                dk[h, column] += (ds.mT @ q[h, row]) * scale
    return {"q": dq, "k": dk, "v": dv}


def target():
    return assay.Target(
        forward, golden, cases=[heads, long], name="flash_base2", outputs=("y", "lse"), saved=("lse",),
        backward=backward, grads=("q", "k", "v"),
    )  # fmt: skip
