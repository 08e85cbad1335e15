"""z[i, j] = (sum_s a[s, i] (x) b[s, j] W + bias) / (eps + sum_s m[s, i] m[s, j]): the outer product mean of an MSA.

a = m (x W_a), b = m (x W_b). The outer products of CHUNK positions i with all j lie in a workspace that a pool hands
out and takes back, blocks of sequences are added to it; the backward forms them again for the gradient of W.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

CHUNK, BLOCK, EPS = 3, 2, 1e-3


@assay.case(S=[5], N=[7], C=[4], H=[3], E=[5])
def msa(make, S, N, C, H, E):
    mask = (make.uniform(S, N) < 0.7).to(make.dtype)
    mask[0] = 1
    mask[1, 0] = mask[S - 1, N - 1] = 0
    return {
        "x": make.normal(S, N, C), "mask": mask, "w_a": make.normal(C, H), "w_b": make.normal(C, H),
        "w": make.normal(H * H, E, std=0.5), "bias": make.normal(E),
    }  # fmt: skip


@assay.case(S=[3], N=[5], C=[3], H=[2], E=[7])
def few(make, S, N, C, H, E):
    return msa[0].draw(make, S, N, C, H, E)


@assay.case(S=[7], N=[4], C=[5], H=[4], E=[2])
def deep(make, S, N, C, H, E):
    return msa[0].draw(make, S, N, C, H, E)


def golden(x, mask, w_a, w_b, w, bias):
    m = mask.unsqueeze(2)
    a, b = assay.stage("a", m * (x @ w_a)), assay.stage("b", m * (x @ w_b))
    norm = assay.stage("norm", EPS + mask.mT @ mask)
    outer = torch.einsum("sih,sjk->ijhk", a, b)
    pre = assay.stage("pre", outer.flatten(2) @ w + bias)
    return pre / norm.unsqueeze(2)


class Pool:
    """Workspaces of one call, handed out and taken back; what is free holds NaN, so that a late read shows."""

    def __init__(self):
        self.free = []

    def take(self, *shape):
        size = math.prod(shape)
        for number, flat in enumerate(self.free):
            if len(flat) >= size:
                return self.free.pop(number)[:size].view(shape)
        return torch.empty(size).view(shape)

    def give(self, buffer):
        self.free.append(buffer.view(-1).fill_(math.nan))


def chunk_of(N):
    return min(CHUNK, N)


def outer_products(pool, a, b, rows):
    """Sums over s of a[s, i] (x) b[s, j] for i in rows and all j, as [I, N, H H], in a workspace of the pool."""
    S, N, H = b.shape
    outer = pool.take(rows.stop - rows.start, N, H, H)
    outer.zero_()
    for s in range(0, S, BLOCK):
        outer += torch.einsum("sih,sjk->ijhk", a[s : s + BLOCK, rows], b[s : s + BLOCK])
    return outer.flatten(2)


class OuterMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, w_a, w_b, w, bias):
        N, E, pool = x.shape[1], w.shape[1], Pool()
        m = mask.unsqueeze(2)
        a, b = assay.stage("a", m * (x @ w_a)), assay.stage("b", m * (x @ w_b))
        norm = assay.stage("norm", EPS + mask.mT @ mask)
        pre = torch.empty(N, N, E)
        step = chunk_of(N)
        for i in range(0, N, step):
            rows = slice(i, min(i + step, N))
            outer = outer_products(pool, a, b, rows)
            pre[rows] = outer @ w + bias
            pool.give(outer)
        pre = assay.stage("pre", pre)
        ctx.save_for_backward(x, mask, w_a, w_b, w, a, b, norm)
        return pre / norm.unsqueeze(2)

    @staticmethod
    def backward(ctx, g):
        x, mask, w_a, w_b, w, a, b, norm = ctx.saved_tensors
        N, H, pool = x.shape[1], w_a.shape[1], Pool()
        dpre = assay.stage("pre.grad", g / norm.unsqueeze(2))
        dw, dbias = torch.zeros(w.shape), dpre.sum((0, 1))
        da, db = torch.empty(a.shape), torch.zeros(b.shape)
        step = chunk_of(N)
        for i in range(0, N, step):
            rows = slice(i, min(i + step, N))
            outer = outer_products(pool, a, b, rows)
            dw += outer.flatten(0, 1).mT @ dpre[rows].flatten(0, 1)
            pool.give(outer)
            douter = (dpre[rows] @ w.mT).unflatten(2, (H, H))
            da[:, rows] = torch.einsum("ijhk,sjk->sih", douter, b)
            db += torch.einsum("ijhk,sih->sjk", douter, a[:, rows])
        m = mask.unsqueeze(2)
        da, db = da * m, db * m
        flat = x.flatten(0, 1).mT
        dw_a, dw_b = flat @ da.flatten(0, 1), flat @ db.flatten(0, 1)
        return da @ w_a.mT + db @ w_b.mT, None, dw_a, dw_b, dw, dbias


def kernel(x, mask, w_a, w_b, w, bias):
    return OuterMean.apply(x, mask, w_a, w_b, w, bias)


def target():
    return assay.Target(
        kernel, golden, cases=[msa, few, deep], name="outer_mean", outputs=("z",),
        grads=("x", "w_a", "w_b", "w", "bias"),
    )  # fmt: skip
