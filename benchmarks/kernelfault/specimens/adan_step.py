"""A step of Adan on one flat buffer: moments of the gradient, of its change and of both, clipped by the global norm.

g = grad min(1, limit / (|grad| + eps)), h = g - previous; m, v, n are moving means of g, h and (g + (1 - beta2) h)^2.
w' = (w - lr (m / c1 + (1 - beta2) v / c2) / (sqrt(n / c3) + eps)) / (1 + lr decay), c = 1 - beta^step. In Triton,
float32: one kernel adds blocks' squares to the norm's with atomics, one steps; the clipped gradient is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 8


@assay.case(P=[29])
def flat(make, P):
    return {
        "w": make.normal(P), "grad": make.normal(P), "previous": make.normal(P, std=0.2), "m": make.normal(P, std=0.1),
        "v": make.normal(P, std=0.1), "n": 0.01 + make.uniform(P) / 4, "step": 3, "lr": 0.05, "limit": 1.0,
        "betas": (0.98, 0.92, 0.99), "decay": 0.1, "eps": 1e-6,
    }  # fmt: skip


@assay.case(P=[13])
def unclipped(make, P):
    return {**flat[0].draw(make, P), "limit": 100.0, "step": 9, "lr": 0.02}


@assay.case(P=[46])
def late(make, P):
    return {**flat[0].draw(make, P), "limit": 2.0, "step": 40, "betas": (0.9, 0.8, 0.95), "decay": 0.5}


def golden(w, grad, previous, m, v, n, step, lr, limit, betas, decay, eps):
    norm = assay.stage("norm", torch.sqrt(grad.square().sum()))
    g = assay.stage("g", grad * (limit / (norm + eps)).clamp(max=1))
    change = g - previous
    b1, b2, b3 = betas
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * change
    n = b3 * n + (1 - b3) * (g + (1 - b2) * change).square()
    c1, c2, c3 = (1 - b**step for b in betas)
    update = assay.stage("update", (m / c1 + (1 - b2) * v / c2) / (torch.sqrt(n / c3) + eps))
    return (w - lr * update) / (1 + lr * decay), m, v, n, g


@triton.jit
def _squares(g_ptr, total_ptr, P, BLOCK: tl.constexpr):
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + p, mask=p < P, other=0.0)
    tl.atomic_add(total_ptr, tl.sum(g * g))


@triton.jit
def _step(w_ptr, grad_ptr, g_ptr, m_ptr, v_ptr, n_ptr, total_ptr, P, lr, limit, b1, b2, b3, c1, c2, c3, decay, eps,
          BLOCK: tl.constexpr):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = p < P
    clip = tl.minimum(1.0, limit / (tl.sqrt(tl.load(total_ptr)) + eps))
    g = tl.load(grad_ptr + p, mask=inside, other=0.0) * clip
    change = g - tl.load(g_ptr + p, mask=inside, other=0.0)
    m = b1 * tl.load(m_ptr + p, mask=inside, other=0.0) + (1 - b1) * g
    v = b2 * tl.load(v_ptr + p, mask=inside, other=0.0) + (1 - b2) * change
    both = g + (1 - b2) * change
    n = b3 * tl.load(n_ptr + p, mask=inside, other=0.0) + (1 - b3) * both * both
    update = (m / c1 + (1 - b2) * v / c2) / (tl.sqrt(n / c3) + eps)
    w = tl.load(w_ptr + p, mask=inside, other=0.0)
    tl.store(w_ptr + p, (w - lr * update) / (1 + lr * decay), mask=inside)
    tl.store(m_ptr + p, m, mask=inside)
    tl.store(v_ptr + p, v, mask=inside)
    tl.store(n_ptr + p, n, mask=inside)
    tl.store(g_ptr + p, g, mask=inside)


def kernel(w, grad, previous, m, v, n, step, lr, limit, betas, decay, eps):
    w, g, m, v, n = (w.new_empty(t.shape).copy_(t) for t in (w, previous, m, v, n))
    P, grad, total = len(w), grad.contiguous(), w.new_zeros(1)
    grid = (triton.cdiv(P, BLOCK),)
    _squares[grid](grad, total, P, BLOCK)
    c1, c2, c3 = (1 - b**step for b in betas)
    _step[grid](w, grad, g, m, v, n, total, P, lr, limit, *betas, c1, c2, c3, decay, eps, BLOCK)
    return w, m, v, n, g


def target():
    return assay.Target(
        kernel, golden, cases=[flat, unclipped, late], name="adan_step",
        outputs=("w_new", "m_new", "v_new", "n_new", "g"), backward=None,
    )  # fmt: skip
