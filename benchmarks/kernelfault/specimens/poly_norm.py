"""y = w[0] n(x^3) + w[1] n(x^2) + w[2] n(x) + b,  n(u) = u / sqrt(mean(u^2) + eps) over a row's D columns.

A polynomial activation whose powers are normalised, in Triton, float32. A program walks over the columns of ROWS rows
twice: once for the means, once for the result. The backward leaves four sums for each program in a workspace, which a
second kernel adds up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

ROWS, COLUMNS, PARTS = 2, 16, 4


@assay.case(T=[7], D=[40])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": 0.3 + make.normal(3), "b": make.normal(1), "eps": 1e-5}


@assay.case(T=[12], D=[21])
def narrow(make, T, D):
    return tokens[0].draw(make, T, D)


def golden(x, w, b, eps):
    def normed(u):
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)

    return w[0] * normed(x**3) + w[1] * normed(x**2) + w[2] * normed(x) + b


@triton.jit
def _fwd_kernel(x_ptr, w_ptr, b_ptr, y_ptr, rstd_ptr, stride_xt, stride_xd, T, D, eps,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    sum6 = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum4 = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum2 = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, COLUMNS):
        cols = start + d
        mask = (t < T)[:, None] & (cols < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * stride_xt + cols[None, :] * stride_xd, mask=mask, other=0.0)
        x2 = x * x
        sum2 += x2
        sum4 += x2 * x2
        sum6 += x2 * x2 * x2
    rstd3 = 1.0 / tl.sqrt(tl.sum(sum6, 1) / D + eps)
    rstd2 = 1.0 / tl.sqrt(tl.sum(sum4, 1) / D + eps)
    rstd1 = 1.0 / tl.sqrt(tl.sum(sum2, 1) / D + eps)
    tl.store(rstd_ptr + t * 3, rstd3, mask=t < T)
    tl.store(rstd_ptr + t * 3 + 1, rstd2, mask=t < T)
    tl.store(rstd_ptr + t * 3 + 2, rstd1, mask=t < T)
    w0, w1, w2 = tl.load(w_ptr), tl.load(w_ptr + 1), tl.load(w_ptr + 2)
    b = tl.load(b_ptr)
    for start in range(0, D, COLUMNS):
        cols = start + d
        mask = (t < T)[:, None] & (cols < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * stride_xt + cols[None, :] * stride_xd, mask=mask, other=0.0)
        cube = w0 * x * x * x * rstd3[:, None]
        square = w1 * x * x * rstd2[:, None]
        y = cube + square + w2 * x * rstd1[:, None] + b
        tl.store(y_ptr + t[:, None] * D + cols[None, :], y, mask=mask)


@triton.jit
def _bwd_kernel(g_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, part_ptr, stride_xt, stride_xd, T, D,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    t = pid * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    w0, w1, w2 = tl.load(w_ptr), tl.load(w_ptr + 1), tl.load(w_ptr + 2)
    rstd3 = tl.load(rstd_ptr + t * 3, mask=t < T, other=0.0)
    rstd2 = tl.load(rstd_ptr + t * 3 + 1, mask=t < T, other=0.0)
    rstd1 = tl.load(rstd_ptr + t * 3 + 2, mask=t < T, other=0.0)
    dot3 = tl.zeros([ROWS], tl.float32)
    dot2 = tl.zeros([ROWS], tl.float32)
    dot1 = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, COLUMNS):
        cols = start + d
        mask = (t < T)[:, None] & (cols < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * stride_xt + cols[None, :] * stride_xd, mask=mask, other=0.0)
        g = tl.load(g_ptr + t[:, None] * D + cols[None, :], mask=mask, other=0.0)
        dot3 += tl.sum(g * x * x * x, 1)
        dot2 += tl.sum(g * x * x, 1)
        dot1 += tl.sum(g * x, 1)
        total += tl.sum(g, 1)
    tl.store(part_ptr + pid * 4, tl.sum(dot3 * rstd3, 0))
    tl.store(part_ptr + pid * 4 + 1, tl.sum(dot2 * rstd2, 0))
    tl.store(part_ptr + pid * 4 + 2, tl.sum(dot1 * rstd1, 0))
    tl.store(part_ptr + pid * 4 + 3, tl.sum(total, 0))
    for start in range(0, D, COLUMNS):
        cols = start + d
        mask = (t < T)[:, None] & (cols < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * stride_xt + cols[None, :] * stride_xd, mask=mask, other=0.0)
        g = tl.load(g_ptr + t[:, None] * D + cols[None, :], mask=mask, other=0.0)
        du3 = w0 * rstd3[:, None] * (g - x * x * x * (rstd3 * rstd3 * dot3 / D)[:, None])
        du2 = w1 * rstd2[:, None] * (g - x * x * (rstd2 * rstd2 * dot2 / D)[:, None])
        du1 = w2 * rstd1[:, None] * (g - x * (rstd1 * rstd1 * dot1 / D)[:, None])
        dx = 3 * x * x * du3 + 2 * x * du2 + du1
        tl.store(dx_ptr + t[:, None] * D + cols[None, :], dx, mask=mask)


@triton.jit
def _sum_kernel(part_ptr, out_ptr, N, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        part = tl.load(part_ptr + n[:, None] * WIDTH + column[None, :], mask=(n < N)[:, None], other=0.0)
        total += tl.sum(part, 0)
    tl.store(out_ptr + column, total)


class PolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        T, D = x.shape
        w, b = w.contiguous(), b.contiguous()
        y, rstd = x.new_empty(T, D), x.new_empty(T, 3)
        _fwd_kernel[(triton.cdiv(T, ROWS),)](
            x, w, b, y, rstd, x.stride(0), x.stride(1), T, D, eps, ROWS, COLUMNS
        )  # fmt: skip
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, w, rstd = ctx.saved_tensors
        T, D = x.shape
        programs = triton.cdiv(T, ROWS)
        dx, part, sums = x.new_empty(T, D), x.new_empty(programs, 4), x.new_empty(4)
        _bwd_kernel[(programs,)](
            grad_y.contiguous(), x, w, rstd, dx, part, x.stride(0), x.stride(1), T, D, ROWS, COLUMNS
        )  # fmt: skip
        _sum_kernel[(1,)](part, sums, programs, PARTS, 4)
        return dx, sums[:3], sums[3:], None


def kernel(x, w, b, eps):
    return PolyNorm.apply(x, w, b, eps)


def target():
    return assay.Target(kernel, golden, cases=[tokens, narrow], name="poly_norm", outputs=("y",))
