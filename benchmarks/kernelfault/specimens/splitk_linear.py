"""y = silu(x w^T + bias): the sum over K is split among programs, whose partial products a second kernel adds up.

Triton, float32. Stage one writes a tile for each of SPLIT ranges of K; stage two adds them in order, adds the bias and
applies silu. The backward forms the pre-activation's gradient with one kernel, which leaves sums of its rows for the
bias, and calls one matmul of any strides twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK, DEPTH, SPLIT = 16, 8, 3


@assay.case(M=[18], N=[21], K=[53])
def tokens(make, M, N, K):
    return {"x": make.normal(M, K), "w": make.normal(N, K, std=0.2), "bias": make.normal(N)}


@assay.case(M=[35], N=[9], K=[24])
def tall(make, M, N, K):
    return tokens[0].draw(make, M, N, K)


def golden(x, w, bias):
    return torch.nn.functional.silu(x @ w.mT + bias)


@triton.jit
def _partial_kernel(x_ptr, w_ptr, part_ptr, sxm, sxk, swn, swk, M, N, K, per_split,
                    BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = split * per_split
    last = tl.minimum(first + per_split, K)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(first, last, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + m[:, None] * sxm + k[None, :] * sxk, mask=(m < M)[:, None] & (k < last)[None, :], other=0.0)
        w = tl.load(w_ptr + n[None, :] * swn + k[:, None] * swk, mask=(n < N)[None, :] & (k < last)[:, None], other=0.0)
        acc += tl.dot(x, w, input_precision="ieee")
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(part_ptr + split * M * N + m[:, None] * N + n[None, :], acc, mask=inside)


@triton.jit
def _finish_kernel(part_ptr, bias_ptr, z_ptr, y_ptr, M, N, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = m[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    z = tl.zeros([BLOCK, BLOCK], tl.float32)
    for split in range(SPLIT):
        z += tl.load(part_ptr + split * M * N + at, mask=inside, other=0.0)
    z += tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(z_ptr + at, z, mask=inside)
    tl.store(y_ptr + at, z * tl.sigmoid(z), mask=inside)


@triton.jit
def _silu_bwd_kernel(g_ptr, z_ptr, dz_ptr, part_ptr, sgm, sgn, M, N, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    m = pid * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + m[:, None] * sgm + n[None, :] * sgn, mask=inside, other=0.0)
    s = tl.sigmoid(z)
    dz = g * s * (1 + z * (1 - s))
    tl.store(dz_ptr + at, dz, mask=inside)
    tl.store(part_ptr + pid * N + n, tl.sum(dz, 0), mask=n < N)


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, sam, sak, sbk, sbn, M, N, K, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(a_ptr + m[:, None] * sam + k[None, :] * sak, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(b_ptr + k[:, None] * sbk + n[None, :] * sbn, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


def matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    _matmul_kernel[grid](a, b, c, a.stride(0), a.stride(1), b.stride(0), b.stride(1), M, N, K, BLOCK, DEPTH)
    return c


class SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias):
        (M, K), N = x.shape, w.shape[0]
        bias = bias.contiguous()
        part = x.new_empty(SPLIT, M, N)
        z, y = x.new_empty(M, N), x.new_empty(M, N)
        per_split = triton.cdiv(triton.cdiv(K, DEPTH), SPLIT) * DEPTH
        tiles = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
        _partial_kernel[(*tiles, SPLIT)](
            x, w, part, x.stride(0), x.stride(1), w.stride(0), w.stride(1), M, N, K, per_split, BLOCK, DEPTH
        )  # fmt: skip
        _finish_kernel[tiles](part, bias, z, y, M, N, SPLIT, BLOCK)
        ctx.save_for_backward(x, w, z)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, z = ctx.saved_tensors
        M, N = z.shape
        tiles = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
        dz, part = torch.empty_like(z), z.new_empty(tiles[0], N)
        _silu_bwd_kernel[tiles](g, z, dz, part, g.stride(0), g.stride(1), M, N, BLOCK)
        dx = matmul(dz, w)
        dw = matmul(dz.mT, x)
        return dx, dw, part.sum(0)


def kernel(x, w, bias):
    return SplitLinear.apply(x, w, bias)


def target():
    return assay.Target(kernel, golden, cases=[tokens, tall], name="splitk_linear", outputs=("y",))
