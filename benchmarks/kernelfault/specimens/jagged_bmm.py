"""y[t] = x[t] w[b] + bias[b] for the rows t of segment b: rows of many lengths, each segment with its own matrix.

Recommenders' jagged-dense product. In Triton, float32: the forward has a program for a tile of rows and columns of a
segment, the backward one for a tile of x's gradient and one for a tile of columns of a segment's w and bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

ROWS, BLOCK = 4, 4


@assay.case(B=[4], T=[9], K=[6], N=[5])
def users(make, B, T, K, N):
    offsets = make.offsets(B, T, empty=1)
    if offsets[B - 1] == T:  # the last segment has rows
        offsets[1:] = offsets.diff().roll(1).cumsum(0)
    first = offsets[offsets > 0].amin() if T else 0
    if first % ROWS == 0 and first < T:  # and the first one with rows has a begun tile
        offsets[offsets == first] -= 1
    return {
        "x": make.normal(T, K), "offsets": offsets, "w": make.normal(B, K, N, std=0.5),
        "bias": make.normal(B, N),
    }  # fmt: skip


@assay.case(B=[3], T=[5], K=[3], N=[7])
def wide(make, B, T, K, N):
    return users[0].draw(make, B, T, K, N)


@assay.case(B=[3], T=[7], K=[5], N=[3])
def tall(make, B, T, K, N):
    return users[0].draw(make, B, T, K, N)


def golden(x, offsets, w, bias):
    bounds = offsets.tolist()
    return torch.cat([x[lo:hi] @ w[b] + bias[b] for b, (lo, hi) in enumerate(zip(bounds, bounds[1:], strict=False))])


@triton.jit
def _forward(x_ptr, at_ptr, w_ptr, bias_ptr, y_ptr, K, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    first, last = tl.load(at_ptr + b), tl.load(at_ptr + b + 1)
    t = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for k0 in range(0, K, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + t[:, None] * K + k[None, :], mask=(t < last)[:, None] & (k < K)[None, :], other=0.0)
        inside = (k < K)[:, None] & (n < N)[None, :]
        w = tl.load(w_ptr + b * K * N + k[:, None] * N + n[None, :], mask=inside, other=0.0)
        acc += tl.sum(x[:, :, None] * w[None, :, :], 1)
    acc += tl.load(bias_ptr + b * N + n, mask=n < N, other=0.0)[None, :]
    tl.store(y_ptr + t[:, None] * N + n[None, :], acc, mask=(t < last)[:, None] & (n < N)[None, :])


@triton.jit
def _backward_x(g_ptr, at_ptr, w_ptr, dx_ptr, K, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    first, last = tl.load(at_ptr + b), tl.load(at_ptr + b + 1)
    t = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + t[:, None] * N + n[None, :], mask=(t < last)[:, None] & (n < N)[None, :], other=0.0)
        inside = (n < N)[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + b * K * N + k[None, :] * N + n[:, None], mask=inside, other=0.0)
        acc += tl.sum(g[:, :, None] * w[None, :, :], 1)
    tl.store(dx_ptr + t[:, None] * K + k[None, :], acc, mask=(t < last)[:, None] & (k < K)[None, :])


@triton.jit
def _backward_w(x_ptr, g_ptr, at_ptr, dw_ptr, dbias_ptr, K, N, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                ALL_K: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    first, last = tl.load(at_ptr + b), tl.load(at_ptr + b + 1)
    n, k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ALL_K)
    acc, sums = tl.zeros([ALL_K, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for t0 in range(first, last, ROWS):
        t = t0 + tl.arange(0, ROWS)
        x = tl.load(x_ptr + t[:, None] * K + k[None, :], mask=(t < last)[:, None] & (k < K)[None, :], other=0.0)
        g = tl.load(g_ptr + t[:, None] * N + n[None, :], mask=(t < last)[:, None] & (n < N)[None, :], other=0.0)
        acc += tl.sum(x[:, :, None] * g[:, None, :], 0)
        sums += tl.sum(g, 0)
    inside = (k < K)[:, None] & (n < N)[None, :]
    tl.store(dw_ptr + b * K * N + k[:, None] * N + n[None, :], acc, mask=inside)
    tl.store(dbias_ptr + b * N + n, sums, mask=n < N)


class Jagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, w, bias):
        x, offsets, w, bias = x.contiguous(), offsets.contiguous(), w.contiguous(), bias.contiguous()
        B, K, N = w.shape
        y, longest = x.new_empty(len(x), N), int(offsets.diff().max())
        grid = (B, triton.cdiv(longest, ROWS), triton.cdiv(N, BLOCK))
        _forward[grid](x, offsets, w, bias, y, K, N, ROWS, BLOCK)
        ctx.save_for_backward(x, offsets, w)
        ctx.longest = longest
        return y

    @staticmethod
    def backward(ctx, g):
        x, offsets, w = ctx.saved_tensors
        B, K, N = w.shape
        g = g.contiguous()
        dx, dw, dbias = torch.empty_like(x), torch.empty_like(w), w.new_empty(B, N)
        grid = (B, triton.cdiv(ctx.longest, ROWS), triton.cdiv(K, BLOCK))
        _backward_x[grid](g, offsets, w, dx, K, N, ROWS, BLOCK)
        grid = (B, triton.cdiv(N, BLOCK))
        _backward_w[grid](x, g, offsets, dw, dbias, K, N, ROWS, BLOCK, triton.next_power_of_2(K))
        return dx, None, dw, dbias


def kernel(x, offsets, w, bias):
    return Jagged.apply(x, offsets, w, bias)


def target():
    return assay.Target(kernel, golden, cases=[users, wide, tall], name="jagged_bmm", outputs=("y",))
