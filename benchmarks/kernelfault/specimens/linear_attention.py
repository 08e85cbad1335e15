"""y[t] = f(q[t]) S[t] / (f(q[t]) . z[t] + eps),  S[t] = sum_{s <= t} f(k[s]) v[s]^T,  z[t] = sum_{s <= t} f(k[s]).

Causal linear attention with f(x) = elu(x) + 1, in chunks: states S and z pass from chunk to chunk, and within a chunk
scores are formed. The backward goes through the chunks twice: forward for q, from the end for k and v.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from goldsmith import assay

CHUNK = 4


@assay.case(H=[2], T=[14], D=[5], E=[3])
def heads(make, H, T, D, E):
    return {"q": make.normal(H, T, D), "k": make.normal(H, T, D), "v": make.normal(H, T, E), "eps": 0.01}


@assay.case(H=[3], T=[9], D=[2], E=[6])
def narrow(make, H, T, D, E):
    return heads[0].draw(make, H, T, D, E)


def golden(q, k, v, eps):
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + eps)


def feature(x):
    return torch.where(x > 0, x + 1, torch.exp(x))


def slope(x):
    return torch.where(x > 0, torch.ones_like(x), torch.exp(x))


class LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, eps):
        H, T, D = q.shape
        state, norm = torch.zeros(H, D, v.shape[2]), torch.zeros(H, D, 1)
        y, below = torch.empty(v.shape), torch.empty(H, T, 1)
        for at in range(0, T, CHUNK):
            now = slice(at, min(at + CHUNK, T))
            fq, fk, vc = feature(q[:, now]), feature(k[:, now]), v[:, now]
            weights = (fq @ fk.mT).tril()
            below[:, now] = weights.sum(-1, keepdim=True) + fq @ norm + eps
            y[:, now] = (weights @ vc + fq @ state) / below[:, now]
            state += fk.mT @ vc
            norm += fk.sum(1).unsqueeze(-1)
        ctx.save_for_backward(q, k, v, y, below)
        return y

    @staticmethod
    def backward(ctx, g):
        q, k, v, y, below = ctx.saved_tensors
        H, T, D = q.shape
        dabove = g / below
        dbelow = -(dabove * y).sum(-1, keepdim=True)
        dq, dk, dv = torch.empty(q.shape), torch.empty(k.shape), torch.empty(v.shape)
        chunks = [slice(at, min(at + CHUNK, T)) for at in range(0, T, CHUNK)]
        state, norm = torch.zeros(H, D, v.shape[2]), torch.zeros(H, D, 1)
        for now in chunks:
            fk = feature(k[:, now])
            dweights = (dabove[:, now] @ v[:, now].mT + dbelow[:, now]).tril()
            dfq = dweights @ fk + dabove[:, now] @ state.mT + dbelow[:, now] @ norm.mT
            dq[:, now] = dfq * slope(q[:, now])
            state += fk.mT @ v[:, now]
            norm += fk.sum(1).unsqueeze(-1)
        dstate, dnorm = torch.zeros(state.shape), torch.zeros(norm.shape)
        for now in reversed(chunks):
            fq, fk = feature(q[:, now]), feature(k[:, now])
            weights = (fq @ fk.mT).tril()
            dweights = (dabove[:, now] @ v[:, now].mT + dbelow[:, now]).tril()
            dfk = dweights.mT @ fq + v[:, now] @ dstate.mT + dnorm.mT
            dk[:, now] = dfk * slope(k[:, now])
            dv[:, now] = weights.mT @ dabove[:, now] + fk @ dstate
            dstate += fq.mT @ dabove[:, now]
            dnorm += fq.mT @ dbelow[:, now]
        return dq, dk, dv, None


def kernel(q, k, v, eps):
    return LinearAttention.apply(q, k, v, eps)


def target():
    return assay.Target(kernel, golden, cases=[heads, narrow], name="linear_attention")
