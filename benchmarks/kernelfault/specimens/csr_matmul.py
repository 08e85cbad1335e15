"""y[i] = sum_j values[j] x[col[j]] over the entries j of row i (crow[i] .. crow[i+1]); with a backward.

A matrix in compressed rows times a dense one. Rows may be empty, and a row may name a column twice: entries are added.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(M=[8], N=[6], K=[40], D=[5])
def rows(make, M, N, K, D):
    return {
        "values": make.normal(K), "crow": make.offsets(M, K, empty=1), "col": make.integers(0, N, K),
        "x": make.normal(N, D),
    }  # fmt: skip


@assay.case(M=[5], N=[9], K=[23], D=[3])
def few(make, M, N, K, D):
    return rows[0].draw(make, M, N, K, D)


def golden(values, crow, col, x):
    owner = torch.repeat_interleave(torch.arange(len(crow) - 1), crow.diff())
    terms = values.unsqueeze(1) * x[col]
    return torch.zeros(len(crow) - 1, x.shape[1], dtype=x.dtype).index_add(0, owner, terms)


def forward(values, crow, col, x):
    edges = crow.tolist()
    y = torch.empty(len(edges) - 1, x.shape[1])
    for i in range(len(edges) - 1):
        lo, hi = edges[i], edges[i + 1]
        total = torch.zeros(x.shape[1])
        for at in range(lo, hi, BLOCK):
            stop = min(at + BLOCK, hi)
            total = total + values[at:stop] @ x[col[at:stop]]
        y[i] = total
    return y


def backward(values, crow, col, x, grad_y):
    owner = torch.searchsorted(crow, torch.arange(len(values)), right=True) - 1
    dvalues = (grad_y[owner] * x[col]).sum(1)
    dx = torch.zeros(x.shape)
    dx.index_add_(0, col, values.unsqueeze(1) * grad_y[owner])
    return {"values": dvalues, "x": dx}


def target():
    return assay.Target(forward, golden, cases=[rows, few], name="csr_matmul", backward=backward)
