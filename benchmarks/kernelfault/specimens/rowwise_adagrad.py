"""G[v] = sum of grad[n] with ids[n] = v, m' = m + mean(G^2), w' = w - lr G / (sqrt(m') + eps): a step on rows.

Row-wise Adagrad as embedding tables have it: one moment a row, rows that nobody looked up stay as they are, an id of
-1 is padding. Lookups are sorted by their row; in Triton, float32, a program sums those of one row and steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay


@assay.case(V=[150], D=[3], N=[12])
def lookups(make, V, D, N):
    ids = make.integers(0, V, N)
    ids[1], ids[N - 2] = ids[0], V - 1
    ids[3], ids[N - 1] = ids[2], -1
    return {
        "weight": make.normal(V, D), "moment": make.uniform(V), "ids": ids, "grad": make.normal(N, D), "lr": 0.1,
        "eps": 1e-2,
    }  # fmt: skip


@assay.case(V=[6], D=[11], N=[14])
def crowded(make, V, D, N):
    return {**lookups[0].draw(make, V, D, N), "lr": 0.03}


@assay.case(V=[17], D=[5], N=[9])
def fresh(make, V, D, N):
    return {**lookups[0].draw(make, V, D, N), "moment": make.uniform(V) * 1e-3, "eps": 1e-1}


def golden(weight, moment, ids, grad, lr, eps):
    valid = ids >= 0
    total = torch.zeros_like(weight).index_add(0, ids[valid], grad[valid])
    moment = moment + total.square().mean(1)
    return weight - lr * total / (torch.sqrt(moment) + eps).unsqueeze(1), moment


@triton.jit
def _step(w_ptr, m_ptr, g_ptr, order_ptr, row_ptr, begin_ptr, D, lr, eps, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    row = tl.load(row_ptr + segment)
    if row >= 0:
        d = tl.arange(0, BLOCK)
        inside = d < D
        total = tl.zeros([BLOCK], tl.float32)
        for at in range(tl.load(begin_ptr + segment), tl.load(begin_ptr + segment + 1)):
            lookup = tl.load(order_ptr + at)
            total += tl.load(g_ptr + lookup * D + d, mask=inside, other=0.0)
        moment = tl.load(m_ptr + row) + tl.sum(total * total) / D
        w = tl.load(w_ptr + row * D + d, mask=inside, other=0.0)
        tl.store(w_ptr + row * D + d, w - lr * total / (tl.sqrt(moment) + eps), mask=inside)
        tl.store(m_ptr + row, moment)


def kernel(weight, moment, ids, grad, lr, eps):
    weight, moment = weight.new_empty(weight.shape).copy_(weight), weight.new_empty(moment.shape).copy_(moment)
    grad, D = grad.contiguous(), weight.shape[1]
    in_order, order = torch.sort(ids)
    rows, counts = torch.unique_consecutive(in_order, return_counts=True)
    begin = counts.new_zeros(len(rows) + 1)
    begin[1:] = counts.cumsum(0)
    _step[(len(rows),)](weight, moment, grad, order, rows, begin, D, lr, eps, triton.next_power_of_2(D))
    return weight, moment


def target():
    return assay.Target(
        kernel, golden, cases=[lookups, crowded, fresh], name="rowwise_adagrad", outputs=("weight_new", "moment_new"),
        backward=None,
    )  # fmt: skip
