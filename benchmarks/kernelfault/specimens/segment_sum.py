"""y[s] = sum and top[s] = maximum of the rows of segment s (offsets), 0 for a segment without rows; with a backward."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(P=[25], S=[5], D=[12])
def rows(make, P, S, D):
    return {"x": make.normal(P, D), "offsets": make.offsets(S, P, empty=1), "w": make.normal(P)}


@assay.case(P=[40], S=[3], D=[7])
def long(make, P, S, D):
    return {"x": make.normal(P, D), "offsets": make.offsets(S, P, empty=0), "w": make.normal(P)}


@assay.case(P=[13], S=[9], D=[20])
def sparse(make, P, S, D):
    return {"x": make.normal(P, D), "offsets": make.offsets(S, P, empty=3), "w": make.normal(P)}


def owners(offsets):
    counts = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def golden(x, offsets, w):
    terms = assay.stage("terms", x * w.unsqueeze(1))
    return torch.zeros(len(offsets) - 1, x.shape[1], dtype=x.dtype).index_add(0, owners(offsets), terms)


def forward(x, offsets, w):
    terms = assay.stage("terms", x * w.unsqueeze(1))
    y = torch.empty(len(offsets) - 1, x.shape[1])
    edges = offsets.tolist()
    for s in range(len(edges) - 1):
        total = torch.zeros(x.shape[1])
        for row in range(edges[s], edges[s + 1]):
            total += terms[row]
        y[s] = total
    return y


def backward(x, offsets, w, grad_y):
    dterms = assay.stage("terms.grad", grad_y[owners(offsets)])
    return {"x": dterms * w.unsqueeze(1), "w": (dterms * x).sum(1)}


def target():
    return assay.Target(
        forward, golden, cases=[rows, long, sparse], name="segment_sum", outputs=("y",), backward=backward
    )
