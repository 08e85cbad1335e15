"""y[t] = 1 / sqrt(n) sum_{k < n} weight[k] table[(ids[t] m[0] + ... + ids[t - k] m[k]) mod M],  n orders that t has.

Embeddings of hashed n-grams: an n-gram does not reach back into the document before its own, so a document's first
token has the unigram only. Plain torch, in chunks of tokens: ids of the chunk before and the number of tokens since the
document began are carried on. The table's gradient is summed row by row after a sort.
"""

from __future__ import annotations

import torch

from goldsmith import assay

CHUNK = 4


@assay.case(B=[3], T=[14], M=[23], D=[5], N=[3])
def documents(make, B, T, M, D, N):
    return {
        "ids": make.integers(0, 50000, B, T), "starts": make.integers(0, 5, B, T) == 0,
        "multipliers": make.integers(10**6, 10**9, N), "table": make.normal(M, D),
        "weight": 1 + make.normal(N, std=0.3),
    }  # fmt: skip


@assay.case(B=[2], T=[9], M=[7], D=[4], N=[4])
def unbroken(make, B, T, M, D, N):
    starts = torch.zeros(B, T, dtype=torch.bool, device=make.device)
    return {**documents[0].draw(make, B, T, M, D, N), "starts": starts}


def golden(ids, starts, multipliers, table, weight):
    B, T = ids.shape
    document, place = starts.cumsum(1), torch.arange(T, device=ids.device)
    key, total, orders = torch.zeros_like(ids), 0.0, 0
    for k in range(len(weight)):
        back = (place - k).clamp_min(0)
        key = key + ids[:, back] * multipliers[k]
        has = (place >= k) & (document[:, back] == document)
        total = total + weight[k] * torch.where(has.unsqueeze(-1), table[key % len(table)], 0.0)
        orders = orders + has
    return total / torch.sqrt(orders.to(table.dtype)).unsqueeze(-1)


def chunks(T):
    return [slice(at, min(at + CHUNK, T)) for at in range(0, T, CHUNK)]


def look_up(ids, starts, multipliers, M):
    """rows[b, t, k] of the table, and the number of orders that a token has."""
    (B, T), N = ids.shape, len(multipliers)
    rows, orders = ids.new_zeros(B, T, N), ids.new_zeros(B, T)
    for b in range(B):
        past, run = ids.new_zeros(N - 1), 0
        for now in chunks(T):
            known = torch.cat([past, ids[b, now]])
            key = torch.zeros_like(ids[b, now])
            for k in range(N):
                key = key + known[N - 1 - k : len(known) - k] * multipliers[k]
                rows[b, now, k] = key % M
            for t in range(now.start, now.stop):
                run = 1 if starts[b, t] else run + 1
                orders[b, t] = min(run, N)
            past = known[len(known) - (N - 1) :]
    return rows, orders


class NgramEmbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, starts, multipliers, table, weight):
        (B, T), N = ids.shape, len(weight)
        rows, orders = look_up(ids, starts, multipliers, len(table))
        inverse = torch.rsqrt(orders.to(table.dtype))
        y = table.new_empty(B, T, table.shape[1])
        for now in chunks(T):
            has = torch.arange(N, device=ids.device) < orders[:, now].unsqueeze(-1)
            share = torch.where(has, weight * inverse[:, now].unsqueeze(-1), 0.0)
            y[:, now] = (share.unsqueeze(-1) * table[rows[:, now]]).sum(2)
        ctx.save_for_backward(rows, orders, inverse, table, weight)
        return y

    @staticmethod
    def backward(ctx, g):
        rows, orders, inverse, table, weight = ctx.saved_tensors
        T, N = rows.shape[1:]
        g = g * inverse.unsqueeze(-1)
        dweight = torch.zeros_like(weight)
        for now in chunks(T):
            has = torch.arange(N, device=rows.device) < orders[:, now].unsqueeze(-1)
            inner = (g[:, now].unsqueeze(2) * table[rows[:, now]]).sum(-1)
            dweight += torch.where(has, inner, 0.0).sum((0, 1))
        b, t, k = torch.nonzero(torch.arange(N, device=rows.device) < orders.unsqueeze(-1), as_tuple=True)
        row, order = torch.sort(rows[b, t, k])
        parts = (weight[k].unsqueeze(-1) * g[b, t])[order]
        dtable = torch.zeros_like(table)
        dtable.index_add_(0, row, parts)
        return None, None, None, dtable, dweight


def kernel(ids, starts, multipliers, table, weight):
    return NgramEmbed.apply(ids, starts, multipliers, table, weight)


def target():
    return assay.Target(kernel, golden, cases=[documents, unbroken], name="ngram_embed", outputs=("y",))
