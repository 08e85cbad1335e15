"""Experts with LoRA on their first product, the hidden axis divided among ranks; weights frozen, the backward by hand.

h = x W1[e]^T + scale (x A[e]^T) B[e]^T,  y = sum over ranks of silu(h)[part] W2[e][:, part]^T,  e = owner of the token

Tokens are sorted by expert for the products and put back. Saved: x and h in the order of the tokens.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[10], E=[3], H=[12], I=[16], R=[4])
def tokens(make, T, E, H, I, R):
    return {
        "x": make.normal(T, H), "w1": make.normal(E, I, H, std=H**-0.5), "a": make.normal(E, R, H, std=H**-0.5),
        "b": make.normal(E, I, R, std=R**-0.5), "w2": make.normal(E, H, I, std=I**-0.5),
        "owner": make.integers(0, E, T), "scale": 0.7, "ranks": 2,
    }  # fmt: skip


@assay.case(T=[7], E=[2], H=[20], I=[8], R=[3])
def narrow(make, T, E, H, I, R):
    return tokens[0].draw(make, T, E, H, I, R)


@assay.case(T=[16], E=[4], H=[9], I=[24], R=[2])
def wide(make, T, E, H, I, R):
    return tokens[0].draw(make, T, E, H, I, R)


def silu_slope(h):
    s = torch.sigmoid(h)
    return s * (1 + h * (1 - s))


def golden(x, w1, a, b, w2, owner, scale, ranks):
    low = assay.stage("low", torch.einsum("th,trh->tr", x, a[owner]))
    base = assay.stage("base", torch.einsum("th,tih->ti", x, w1[owner]))
    h = assay.stage("h", base + scale * torch.einsum("tr,tir->ti", low, b[owner]))
    act = assay.stage("act", torch.nn.functional.silu(h))
    down = w2[owner]
    parts = [torch.einsum("ti,thi->th", p, q) for p, q in zip(act.chunk(ranks, 1), down.chunk(ranks, 2), strict=True)]
    partial = assay.stage("partial", torch.stack(parts))
    return partial.sum(0), x * 1, h


def by_expert(owner):
    """The order in which tokens are sorted by expert, and each expert's slice of it."""
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=int(owner.max()) + 1)
    ends = counts.cumsum(0).tolist()
    return order, [slice(e - c, e) for e, c in zip(ends, counts.tolist(), strict=True)]


def grouped(rows, weights, groups):
    """rows[group of e] @ weights[e]^T, all groups"""
    out = torch.empty(len(rows), weights.shape[1])
    for e, group in enumerate(groups):
        out[group] = rows[group] @ weights[e].mT
    return out


def forward(x, w1, a, b, w2, owner, scale, ranks):
    T, H = x.shape
    order, groups = by_expert(owner)
    back = torch.argsort(order)
    sorted_x = x[order]
    base = assay.stage("base", grouped(sorted_x, w1, groups)[back])[order]
    low = assay.stage("low", grouped(sorted_x, a, groups)[back])[order]
    h = base + scale * grouped(low, b, groups)
    h = assay.stage("h", h[back])
    act = assay.stage("act", h * torch.sigmoid(h))[order]
    width = w2.shape[2] // ranks
    partial = torch.empty(ranks * T * H)
    for rank in range(ranks):
        part = slice(rank * width, (rank + 1) * width)
        done = grouped(act[:, part], w2[:, :, part], groups)[back]
        torch.as_strided(partial, (T, H), (H, 1), partial.storage_offset() + rank * T * H).copy_(done)
    partial = assay.stage("partial", partial.view(ranks, T, H))
    y = torch.zeros(T, H)
    for rank in range(ranks):
        y += partial[rank]
    kept_x, kept_h = sorted_x[back].clone(), h.clone()
    return y, kept_x, kept_h


def backward(x, w1, a, b, w2, owner, scale, ranks, kept_x, kept_h, grad_y):
    T, H = x.shape
    order, groups = by_expert(owner)
    back = torch.argsort(order)
    sorted_x, h, g = kept_x[order], kept_h[order], grad_y[order]
    width = w2.shape[2] // ranks
    dact = torch.zeros(T, w2.shape[2])
    for rank in range(ranks):
        part = slice(rank * width, (rank + 1) * width)
        dact[:, part] += grouped(g, w2[:, :, part].mT, groups)
    dact = assay.stage("act.grad", dact[back])[order]
    dh = assay.stage("h.grad", (dact * silu_slope(h))[back])[order]
    dlow = assay.stage("low.grad", (scale * grouped(dh, b.mT, groups))[back])[order]
    dx_base = grouped(dh, w1.mT, groups)
    dx_low = grouped(dlow, a.mT, groups)
    dx = torch.empty(T, H)
    torch.as_strided(dx, (T, H), (H, 1), dx.storage_offset()).copy_((dx_base + dx_low)[back])
    low = grouped(sorted_x, a, groups)
    da, db = torch.zeros_like(a), torch.zeros_like(b)
    for e, group in enumerate(groups):
        da[e] = dlow[group].mT @ sorted_x[group]
        db[e] = scale * dh[group].mT @ low[group]
    return {"x": dx, "a": da, "b": db}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, narrow, wide], name="lora_expert", outputs=("y", "kept_x", "kept_h"),
        saved=("kept_x", "kept_h"), backward=backward, grads=("x", "a", "b"),
    )  # fmt: skip
