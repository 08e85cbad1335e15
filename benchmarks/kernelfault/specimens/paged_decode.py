"""softmax(q k^T / sqrt(D)) v of one new token for each sequence, with keys and values in pages that a table names.

Several query heads share a head of keys. A sequence's pages are divided among splits; each writes its maximum, sum and
weighted values into a workspace, from which they are joined.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

PAGES = 2


@assay.case(B=[3], H=[4], KV=[2], D=[5], P=[16], S=[4], M=[5])
def sequences(make, B, H, KV, D, P, S, M):
    return {
        "q": make.normal(B, H, D), "k": make.normal(P, S, KV, D), "v": make.normal(P, S, KV, D),
        "table": make.permutation(P)[: B * M].view(B, M), "length": make.integers(2, M * S + 1, B),
    }  # fmt: skip


@assay.case(B=[2], H=[6], KV=[2], D=[3], P=[9], S=[3], M=[4])
def shared(make, B, H, KV, D, P, S, M):
    return sequences[0].draw(make, B, H, KV, D, P, S, M)


def golden(q, k, v, table, length):
    ys, lses = [], []
    for b in range(len(q)):
        keys = k[table[b]].flatten(0, 1)[: length[b]].repeat_interleave(q.shape[1] // k.shape[2], 1)
        values = v[table[b]].flatten(0, 1)[: length[b]].repeat_interleave(q.shape[1] // k.shape[2], 1)
        scores = torch.einsum("hd,thd->ht", q[b], keys) / math.sqrt(q.shape[-1])
        ys.append(torch.einsum("ht,thd->hd", torch.softmax(scores, -1), values))
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(ys), torch.stack(lses)


def split_kernel(q, k, v, table, count, kv, first):
    """Maximum, sum and weighted values of the splits' pages from `first` on, of a sequence with `count` tokens."""
    S = k.shape[1]
    top, total, acc = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(q.shape)
    for logical in range(first, min(first + PAGES, -(-count // S))):
        page = table[logical]
        filled = min(S, count - logical * S)
        scores = k[page, :filled, kv] @ q * q.shape[0] ** -0.5
        higher = torch.maximum(top, scores.amax())
        e, keep = torch.exp(scores - higher), torch.exp(top - higher)
        total = total * keep + e.sum()
        acc = acc * keep + e @ v[page, :filled, kv]
        top = higher
    return top, total, acc


def decode(q, k, v, table, length):
    B, H, D = q.shape
    S, KV = k.shape[1], k.shape[2]
    splits = -(-table.shape[1] // PAGES)
    tops, totals, accs = torch.empty(splits), torch.empty(splits), torch.empty(splits, D)
    y, lse = torch.empty(B, H, D), torch.empty(B, H)
    for b in range(B):
        count = int(length[b])
        used = -(-count // (S * PAGES))
        for h in range(H):
            kv = h // (H // KV)
            for split in range(used):
                done = split_kernel(q[b, h], k, v, table[b], count, kv, split * PAGES)
                tops[split], totals[split], accs[split] = done
            top = tops[:used].amax()
            share = torch.exp(tops[:used] - top)
            total = (totals[:used] * share).sum()
            y[b, h] = share @ accs[:used] / total
            lse[b, h] = top + torch.log(total)
    return y, lse


def target():
    return assay.Target(
        decode, golden, cases=[sequences, shared], name="paged_decode", outputs=("y", "lse"), backward=None
    )
