"""y = weight (up + 1) gate sigmoid(1.702 gate),  gate = min(a, limit), up = clamp(b, -limit, limit), (a, b) = x + bias.

The activation of an expert layer whose gate and up columns alternate; each row has its expert's bias and its routing
weight. Triton, float32: a program has a row and a block of columns. Rows of an expert share its bias, so the backward
adds their gradients atomically; the weight's gradient is summed over blocks of columns the same way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK, ALPHA = 8, 1.702


@assay.case(T=[9], F=[13], E=[4])
def tokens(make, T, F, E):
    return {
        "x": 2 * make.normal(T, 2 * F), "bias": make.normal(E, 2 * F), "expert": make.integers(0, E, T),
        "weight": make.uniform(T), "limit": 1.75,
    }  # fmt: skip


@assay.case(T=[6], F=[16], E=[3])
def loose(make, T, F, E):
    return {**tokens[0].draw(make, T, F, E), "x": 3 * make.normal(2 * F, T).T, "limit": 3.5}


def golden(x, bias, expert, weight, limit):
    shifted = x + bias[expert]
    gate, up = shifted[:, ::2].clamp(max=limit), shifted[:, 1::2].clamp(-limit, limit)
    return weight.unsqueeze(-1) * (up + 1) * gate * torch.sigmoid(ALPHA * gate)


@triton.jit
def _shifted(x_ptr, bias_ptr, row, e, col, F):
    m = col < F
    a = tl.load(x_ptr + row * 2 * F + 2 * col, mask=m, other=0.0)
    b = tl.load(x_ptr + row * 2 * F + 2 * col + 1, mask=m, other=0.0)
    a += tl.load(bias_ptr + e * 2 * F + 2 * col, mask=m, other=0.0)
    b += tl.load(bias_ptr + e * 2 * F + 2 * col + 1, mask=m, other=0.0)
    return a, b


@triton.jit
def _fwd_kernel(x_ptr, bias_ptr, expert_ptr, weight_ptr, y_ptr, F, limit, ALPHA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b = _shifted(x_ptr, bias_ptr, row, tl.load(expert_ptr + row), col, F)
    gate = tl.minimum(a, limit)
    up = tl.minimum(tl.maximum(b, -limit), limit)
    y = (up + 1.0) * gate * tl.sigmoid(ALPHA * gate)
    tl.store(y_ptr + row * F + col, y * tl.load(weight_ptr + row), mask=col < F)


@triton.jit
def _bwd_kernel(x_ptr, bias_ptr, expert_ptr, weight_ptr, g_ptr, dx_ptr, dbias_ptr, dweight_ptr, F, limit,
                ALPHA: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = col < F
    e = tl.load(expert_ptr + row)
    a, b = _shifted(x_ptr, bias_ptr, row, e, col, F)
    gate = tl.minimum(a, limit)
    up = tl.minimum(tl.maximum(b, -limit), limit)
    sig = tl.sigmoid(ALPHA * gate)
    g = tl.load(g_ptr + row * F + col, mask=m, other=0.0)
    tl.atomic_add(dweight_ptr + row, tl.sum(g * (up + 1.0) * gate * sig))
    g *= tl.load(weight_ptr + row)
    da = g * (up + 1.0) * sig * (1.0 + ALPHA * gate * (1.0 - sig))
    da = tl.where(a <= limit, da, 0.0)
    db = tl.where((b >= -limit) & (b <= limit), g * gate * sig, 0.0)
    tl.store(dx_ptr + row * 2 * F + 2 * col, da, mask=m)
    tl.store(dx_ptr + row * 2 * F + 2 * col + 1, db, mask=m)
    tl.atomic_add(dbias_ptr + e * 2 * F + 2 * col, da, mask=m)
    tl.atomic_add(dbias_ptr + e * 2 * F + 2 * col + 1, db, mask=m)


class ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, expert, weight, limit):
        x, bias, expert, weight = (t.contiguous() for t in (x, bias, expert, weight))
        T, F = x.shape[0], x.shape[1] // 2
        y = x.new_empty(T, F)
        _fwd_kernel[(T, triton.cdiv(F, BLOCK))](x, bias, expert, weight, y, F, limit, ALPHA, BLOCK)
        ctx.save_for_backward(x, bias, expert, weight)
        ctx.limit = limit
        return y

    @staticmethod
    def backward(ctx, g):
        x, bias, expert, weight = ctx.saved_tensors
        T, F = g.shape
        dx, dbias, dweight = torch.empty_like(x), torch.zeros_like(bias), torch.zeros_like(weight)
        _bwd_kernel[(T, triton.cdiv(F, BLOCK))](
            x, bias, expert, weight, g.contiguous(), dx, dbias, dweight, F, ctx.limit, ALPHA, BLOCK
        )  # fmt: skip
        return dx, dbias, None, dweight, None


def kernel(x, bias, expert, weight, limit):
    return ClampedSwiGLU.apply(x, bias, expert, weight, limit)


def target():
    return assay.Target(kernel, golden, cases=[tokens, loose], name="clamped_swiglu", outputs=("y",))
