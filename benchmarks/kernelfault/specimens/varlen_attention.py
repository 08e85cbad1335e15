"""softmax(q k^T / sqrt(D) - slope |i + Lk - Lq - j|) v for sequences packed one behind another: cross attention.

Sequences of queries and of keys have lengths of their own; distances are counted from the ends. Keys come in blocks
with running maximum and sum, and the backward goes block by block again from the saved logsumexp.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(B=[3], Q=[12], K=[19], H=[2], D=[4])
def packed(make, B, Q, K, H, D):
    return {
        "q": make.normal(Q, H, D), "k": make.normal(K, H, D), "v": make.normal(K, H, D), "slope": make.uniform(H),
        "cu_q": make.offsets(B, Q, empty=0), "cu_k": make.offsets(B, K, empty=0),
    }  # fmt: skip


@assay.case(B=[2], Q=[9], K=[14], H=[3], D=[5])
def long(make, B, Q, K, H, D):
    return packed[0].draw(make, B, Q, K, H, D)


def golden(q, k, v, slope, cu_q, cu_k):
    ys, lses = [], []
    for b in range(len(cu_q) - 1):
        qs, ks, vs = q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : cu_k[b + 1]], v[cu_k[b] : cu_k[b + 1]]
        far = torch.arange(len(qs))[:, None] + len(ks) - len(qs) - torch.arange(len(ks))
        scores = torch.einsum("ihd,jhd->hij", qs, ks) / math.sqrt(q.shape[-1]) - slope[:, None, None] * far.abs()
        ys.append(torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1), vs))
        lses.append(torch.logsumexp(scores, -1).mT)
    return torch.cat(ys), torch.cat(lses)


def scored(q, k, slope, queries, keys, shift, head):
    """The scores of the queries and keys at those places, which lie `shift` apart."""
    far = queries.unsqueeze(1) + shift - keys.unsqueeze(0)
    return q[queries, head] @ k[keys, head].mT * q.shape[2] ** -0.5 - slope[head] * far.abs()


def sequences(cu_q, cu_k):
    """Of each sequence: its queries, its key blocks, and by how much a key's place is ahead of its query's."""
    for b in range(len(cu_q) - 1):
        first, last, lo, hi = int(cu_q[b]), int(cu_q[b + 1]), int(cu_k[b]), int(cu_k[b + 1])
        blocks = [torch.arange(at, min(at + BLOCK, hi)) for at in range(lo, hi, BLOCK)]
        yield torch.arange(first, last), blocks, hi - last


def forward(q, k, v, slope, cu_q, cu_k):
    y, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    for queries, blocks, shift in sequences(cu_q, cu_k):
        for head in range(q.shape[1]):
            top = torch.full((len(queries), 1), -math.inf)
            total, acc = torch.zeros(len(queries), 1), torch.zeros(len(queries), q.shape[2])
            for keys in blocks:
                scores = scored(q, k, slope, queries, keys, shift, head)
                higher = torch.maximum(top, scores.amax(1, keepdim=True))
                e, keep = torch.exp(scores - higher), torch.exp(top - higher)
                total = total * keep + e.sum(1, keepdim=True)
                acc = acc * keep + e @ v[keys, head]
                top = higher
            y[queries, head] = acc / total
            lse[queries, head] = (top + torch.log(total)).squeeze(1)
    return y, lse


def backward(q, k, v, slope, cu_q, cu_k, y, lse, grad_y):
    scale = q.shape[2] ** -0.5
    dq, dk, dv = torch.zeros(q.shape), torch.empty(k.shape), torch.empty(v.shape)
    delta = (grad_y * y).sum(-1)
    for queries, blocks, shift in sequences(cu_q, cu_k):
        for head in range(q.shape[1]):
            g = grad_y[queries, head]
            for keys in blocks:
                p = torch.exp(scored(q, k, slope, queries, keys, shift, head) - lse[queries, head].unsqueeze(1))
                ds = p * (g @ v[keys, head].mT - delta[queries, head].unsqueeze(1))
                dv[keys, head] = p.mT @ g
                dk[keys, head] = ds.mT @ q[queries, head] * scale
                dq[queries, head] += ds @ k[keys, head] * scale
    return {"q": dq, "k": dk, "v": dv}


def target():
    return assay.Target(
        forward, golden, cases=[packed, long], name="varlen_attention", outputs=("y", "lse"), saved=("lse",),
        backward=backward, grads=("q", "k", "v"),
    )  # fmt: skip
