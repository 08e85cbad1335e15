"""y = dropout(softmax(q k^T / sqrt(D) - slope (i - j), causal), p) v in blocks: ALiBi with dropout from a counter.

Head h of H has the slope 2^(-8 (h + 1) / H). What is dropped is a hash of the seed and of the weight's place (head, i,
j), so that the backward, which goes block by block from the saved logsumexp, makes the same choice without a mask.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(H=[2], T=[10], D=[4])
def heads(make, H, T, D):
    return {
        "q": make.normal(H, T, D), "k": make.normal(H, T, D), "v": make.normal(H, T, D), "p": 0.25,
        "seed": 1729,
    }  # fmt: skip


@assay.case(H=[3], T=[7], D=[5])
def few(make, H, T, D):
    return {**heads[0].draw(make, H, T, D), "p": 0.5, "seed": 41}


def kept(seed, p, place):
    """Whether the weight at that place is kept: a hash of 32 bits is not below p 2^32."""
    x = (place * 747796405 + seed * 2891336453) & 0xFFFFFFFF
    x = (((x >> 15) ^ x) * 277803737) & 0xFFFFFFFF
    return ((x >> 12) ^ x) >= int(p * 2**32)


def slopes(H):
    return torch.tensor([2 ** (-8 * (h + 1) / H) for h in range(H)], dtype=torch.float64)


def golden(q, k, v, p, seed):
    H, T, D = q.shape
    t = torch.arange(T)
    scores = (q.unsqueeze(2) * k.unsqueeze(1)).sum(-1) / math.sqrt(D) - slopes(H)[:, None, None] * (t[:, None] - t)
    scores = scores.masked_fill(t > t[:, None], -math.inf)
    drop = kept(seed, p, torch.arange(H * T * T).view(H, T, T)).to(q.dtype)
    weight = torch.softmax(scores, -1) * drop / (1 - p)
    return (weight.unsqueeze(-1) * v.unsqueeze(1)).sum(2)


def block(q, k, slope, rows, keys):
    """A head's scores of those rows and keys."""
    far = rows.unsqueeze(1) - keys
    scores = q[rows] @ k[keys].mT * q.shape[1] ** -0.5 - slope * far
    return torch.where(far < 0, -math.inf, scores)


def pieces(T):
    return [torch.arange(at, min(at + BLOCK, T)) for at in range(0, T, BLOCK)]


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, p, seed):
        H, T, D = q.shape
        slope = slopes(H).float()
        y, lse = torch.empty(H, T, D), torch.empty(H, T)
        for h in range(H):
            for n, rows in enumerate(pieces(T)):
                top = torch.full((len(rows), 1), -math.inf)
                total, acc = torch.zeros(len(rows), 1), torch.zeros(len(rows), D)
                for keys in pieces(T)[: n + 1]:
                    scores = block(q[h], k[h], slope[h], rows, keys)
                    drop = kept(seed, p, (h * T + rows.unsqueeze(1)) * T + keys)
                    higher = torch.maximum(top, scores.amax(1, keepdim=True))
                    e, fade = torch.exp(scores - higher), torch.exp(top - higher)
                    total = total * fade + e.sum(1, keepdim=True)
                    acc = acc * fade + (e * drop) @ v[h, keys]
                    top = higher
                y[h, rows] = acc / (total * (1 - p))
                lse[h, rows] = (top + torch.log(total)).squeeze(1)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.p, ctx.seed = p, seed
        return y

    @staticmethod
    def backward(ctx, g):
        q, k, v, y, lse = ctx.saved_tensors
        p, seed = ctx.p, ctx.seed
        H, T, D = q.shape
        slope = slopes(H).float()
        dq, dk, dv = torch.zeros(H, T, D), torch.zeros(H, T, D), torch.zeros(H, T, D)
        delta = (g * y).sum(-1, keepdim=True)
        for h in range(H):
            for n, keys in enumerate(pieces(T)):
                for rows in pieces(T)[n:]:
                    scores = block(q[h], k[h], slope[h], rows, keys)
                    weight = torch.exp(scores - lse[h, rows].unsqueeze(1))
                    drop = kept(seed, p, (h * T + rows.unsqueeze(1)) * T + keys) / (1 - p)
                    ds = weight * (drop * (g[h, rows] @ v[h, keys].mT) - delta[h, rows])
                    dv[h, keys] += (weight * drop).mT @ g[h, rows]
                    dq[h, rows] += ds @ k[h, keys] * D**-0.5
                    dk[h, keys] += ds.mT @ q[h, rows] * D**-0.5
        return dq, dk, dv, None, None


def kernel(q, k, v, p, seed):
    return Attention.apply(q, k, v, p, seed)


def target():
    return assay.Target(kernel, golden, cases=[heads, few], name="alibi_dropout", outputs=("y",))
