"""y[b] = mean of table[id] over the ids of bag b that are not the padding; 0 for a bag without any. With a backward.

Bags lie one after another in ids, between offsets. An id may stand in several bags, and several times in one.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(B=[6], P=[31], V=[9], D=[4])
def bags(make, B, P, V, D):
    return {
        "table": make.normal(V, D), "ids": make.integers(0, V, P), "offsets": make.offsets(B, P, empty=1),
        "padding": 2,
    }  # fmt: skip


@assay.case(B=[4], P=[17], V=[5], D=[7])
def few(make, B, P, V, D):
    return bags[0].draw(make, B, P, V, D)


def golden(table, ids, offsets, padding):
    owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    kept = (ids != padding).to(table.dtype)
    count = torch.zeros(len(offsets) - 1, dtype=table.dtype).index_add(0, owner, kept)
    rows = table[ids] * kept.unsqueeze(1)
    total = torch.zeros(len(offsets) - 1, table.shape[1], dtype=table.dtype).index_add(0, owner, rows)
    return total / count.clamp(min=1).unsqueeze(1)


def counts(ids, offsets, padding):
    edges = offsets.tolist()
    return edges, [int((ids[lo:hi] != padding).sum()) for lo, hi in zip(edges, edges[1:], strict=False)]


def forward(table, ids, offsets, padding):
    edges, kept = counts(ids, offsets, padding)
    y = torch.empty(len(kept), table.shape[1])
    for b, n in enumerate(kept):
        total = torch.zeros(table.shape[1])
        for i in ids[edges[b] : edges[b + 1]].tolist():
            if i != padding:
                total += table[i]
        y[b] = total / max(n, 1)
    return y


def backward(table, ids, offsets, padding, grad_y):
    edges, kept = counts(ids, offsets, padding)
    dtable = torch.zeros(table.shape)
    for b, n in enumerate(kept):
        bag = ids[edges[b] : edges[b + 1]]
        bag = bag[bag != padding]
        share = grad_y[b] / max(n, 1)
        dtable.index_add_(0, bag, share.expand(len(bag), -1))
    return {"table": dtable}


def target():
    return assay.Target(forward, golden, cases=[bags, few], name="embedding_bag", backward=backward)
