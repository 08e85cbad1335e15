"""y[t] = sum_k gate[t, k] x[t] w[expert[t, k]]: rows are put in order of experts by counting, multiplied, and put back.

The dispatch of a mixture of experts: bincount, exclusive sums, a place for every choice, products in tiles of rows.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE = 4


@assay.case(T=[15], K=[2], E=[4], D=[6], F=[10])
def choices(make, T, K, E, D, F):
    return {
        "x": make.normal(T, D), "expert": make.integers(0, E, T, K), "gate": make.uniform(T, K),
        "w": make.normal(E, D, F),
    }  # fmt: skip


@assay.case(T=[9], K=[3], E=[5], D=[7], F=[4])
def idle(make, T, K, E, D, F):
    """Nobody chooses the last expert."""
    return {**choices[0].draw(make, T, K, E, D, F), "expert": make.integers(0, E - 1, T, K)}


def golden(x, expert, gate, w):
    T, K = expert.shape
    order = expert.flatten().argsort(stable=True)
    rows = assay.stage("rows", x[order // K])
    product = assay.stage("product", torch.einsum("rd,rdf->rf", rows, w[expert.flatten()[order]]))
    back = torch.empty_like(order).scatter(0, order, torch.arange(T * K))
    return (product[back].view(T, K, -1) * gate.unsqueeze(-1)).sum(1)


def places(expert, E):
    """The place of every choice in the order of experts, and each expert's first and last place."""
    flat = expert.flatten()
    counts = torch.bincount(flat, minlength=E)
    ends = counts.cumsum(0)
    starts = ends - counts
    place, cursor = torch.empty_like(flat), starts.clone()
    for i, e in enumerate(flat.tolist()):
        place[i] = cursor[e]
        cursor[e] += 1
    return place, starts.tolist(), ends.tolist()


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, expert, gate, w):
        T, K = expert.shape
        place, starts, ends = places(expert, len(w))
        rows = torch.empty(T * K, x.shape[1])
        rows[place] = x.repeat_interleave(K, 0)
        rows = assay.stage("rows", rows)
        product = torch.empty(T * K, w.shape[2])
        for e in range(len(w)):
            for at in range(starts[e], ends[e], TILE):
                stop = min(at + TILE, ends[e])
                product[at:stop] = rows[at:stop] @ w[e]
        product = assay.stage("product", product)
        ctx.save_for_backward(rows, product, place, gate, w)
        ctx.edges = starts, ends
        return (product[place].view(T, K, -1) * gate.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx, g):
        rows, product, place, gate, w = ctx.saved_tensors
        T, K = gate.shape
        dgate = (product[place].view(T, K, -1) * g.unsqueeze(1)).sum(-1)
        dproduct = torch.empty(product.shape)
        dproduct[place] = (g.unsqueeze(1) * gate.unsqueeze(-1)).reshape(T * K, -1)
        dproduct = assay.stage("product.grad", dproduct)
        drows, dw = torch.empty(rows.shape), torch.zeros(w.shape)
        for e, (lo, hi) in enumerate(zip(*ctx.edges, strict=True)):
            dw[e] = rows[lo:hi].mT @ dproduct[lo:hi]
            drows[lo:hi] = dproduct[lo:hi] @ w[e].mT
        drows = assay.stage("rows.grad", drows)
        dx = drows[place].view(T, K, -1).sum(1)
        return dx, None, dgate, dw


def kernel(x, expert, gate, w):
    return Experts.apply(x, expert, gate, w)


def target():
    return assay.Target(kernel, golden, cases=[choices, idle], name="moe_dispatch")
