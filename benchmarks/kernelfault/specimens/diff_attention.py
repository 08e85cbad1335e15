"""y = rms(softmax(q1 k1^T / sqrt(D)) v - lam softmax(q2 k2^T / sqrt(D)) v) w (1 - init): causal differential attention.

Two streams of queries and keys share the values. Tiles of rows meet blocks of keys online, both streams' outputs and
logsumexps are saved. The backward goes through the norm of each head, splits into the streams and forms p again.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

ROWS, KEYS, EPS = 4, 4, 1e-5


@assay.case(H=[2], T=[11], D=[4], E=[6])
def heads(make, H, T, D, E):
    return {
        "q": make.normal(H, 2, T, D), "k": make.normal(H, 2, T, D), "v": make.normal(H, T, E),
        "lam": 0.2 + make.uniform(H) / 2, "weight": make.normal(E), "init": 0.2,
    }  # fmt: skip


@assay.case(H=[1], T=[9], D=[6], E=[5])
def one(make, H, T, D, E):
    return {**heads[0].draw(make, H, T, D, E), "init": 0.5}


@assay.case(H=[3], T=[6], D=[3], E=[4])
def short(make, H, T, D, E):
    return {**heads[0].draw(make, H, T, D, E), "init": 0.8}


def golden(q, k, v, lam, weight, init):
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(later, -math.inf)
    streams = assay.stage("streams", torch.softmax(scores, -1) @ v.unsqueeze(1))
    mixed = assay.stage("mixed", streams[:, 0] - lam[:, None, None] * streams[:, 1])
    inv_rms = assay.stage("inv_rms", torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS))
    return mixed * inv_rms * weight * (1 - init)


def scored(q, k, row, key):
    """Scores of the tile of rows from `row` with the keys from `key`, nothing after the diagonal."""
    scores = q[row : row + ROWS] @ k[key : key + KEYS].mT * q.shape[1] ** -0.5
    late = torch.arange(key, key + scores.shape[1]) > torch.arange(row, row + len(scores)).unsqueeze(1)
    return scores.masked_fill(late, -math.inf)


def attend(q, k, v, row):
    """A tile of rows of one stream: its output and its logsumexp."""
    n = min(ROWS, len(q) - row)
    top, total, acc = torch.full((n, 1), -math.inf), torch.zeros(n, 1), torch.zeros(n, v.shape[1])
    for key in range(0, row + n, KEYS):
        scores = scored(q, k, row, key)
        higher = torch.maximum(top, scores.amax(1, keepdim=True))
        e, keep = torch.exp(scores - higher), torch.exp(top - higher)
        total = total * keep + e.sum(1, keepdim=True)
        acc = acc * keep + e @ v[key : key + KEYS]
        top = higher
    return acc / total, (top + torch.log(total)).squeeze(1)


class DiffAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lam, weight, init):
        (H, _, T, _), E = q.shape, v.shape[2]
        streams, lse = torch.empty(H, 2, T, E), torch.empty(H, 2, T)
        for h in range(H):
            for s in range(2):
                for row in range(0, T, ROWS):
                    streams[h, s, row : row + ROWS], lse[h, s, row : row + ROWS] = attend(q[h, s], k[h, s], v[h], row)
        streams = assay.stage("streams", streams)
        mixed = assay.stage("mixed", streams[:, 0] - lam.reshape(H, 1, 1) * streams[:, 1])
        inv_rms = torch.rsqrt((mixed * mixed).sum(2, keepdim=True) / E + EPS)
        ctx.save_for_backward(q, k, v, lam, weight, streams, mixed, inv_rms, lse)
        ctx.init = init
        return mixed * inv_rms * (weight * (1 - init))

    @staticmethod
    def backward(ctx, g):
        q, k, v, lam, weight, streams, mixed, inv_rms, lse = ctx.saved_tensors
        (H, _, T, D), E = q.shape, v.shape[2]
        dq, dk, dv = torch.empty(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
        unit, gain = mixed * inv_rms, 1 - ctx.init
        d_unit = g * weight * gain
        d_mixed = inv_rms * (d_unit - unit * (d_unit * unit).sum(2, keepdim=True) / E)
        d_lam = -(d_mixed * streams[:, 1]).sum((1, 2))
        for h in range(H):
            for s in range(2):
                d_out = d_mixed[h] if s == 0 else -lam[h] * d_mixed[h]
                delta = (d_out * streams[h, s]).sum(1, keepdim=True)
                for row in range(0, T, ROWS):
                    tile = slice(row, row + ROWS)
                    acc = torch.zeros(min(ROWS, T - row), D)
                    for key in range(0, min(row + ROWS, T), KEYS):
                        keys = slice(key, key + KEYS)
                        p = torch.exp(scored(q[h, s], k[h, s], row, key) - lse[h, s, tile].unsqueeze(1))
                        ds = p * (d_out[tile] @ v[h, keys].mT - delta[tile]) * D**-0.5
                        acc += ds @ k[h, s, keys]
                        dk[h, s, keys] += ds.mT @ q[h, s, tile]
                        dv[h, keys] += p.mT @ d_out[tile]
                    dq[h, s, tile] = acc
        return dq, dk, dv, d_lam, (g * unit).sum((0, 1)) * gain, None


def kernel(q, k, v, lam, weight, init):
    return DiffAttention.apply(q, k, v, lam, weight, init)


def target():
    return assay.Target(kernel, golden, cases=[heads, one, short], name="diff_attention", outputs=("y",))
