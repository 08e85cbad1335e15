"""mix[t, m] = sum_k x[t, k] gamma[k] phi[m, k]  and  sum_k x[t, k]^2, as partial sums over slices of D.

One program handles BLOCK_T tokens and one slice of every stream. The kernel that reads the partial sums adds the slices
in order. Traffic: x once (N*D elements per token), and phi once per BLOCK_T tokens from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .float32_products import dot, int64_stride, split, transposed
from .launch import CHUNK_D, INTERPRET, LANES, PARTS, SLICE_D


@triton.jit
def load_phi(
    phi_ptr, gamma_ptr, stream, d, M, D: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, HAS_GAMMA: tl.constexpr
):
    """phi[:, stream, d] * gamma[stream, d] in float32, zero beyond M and D: [MP, BLOCK_D]."""
    m = tl.arange(0, MP)
    inside = (m < M)[:, None] & (d < D)[None, :]
    phi = tl.load(phi_ptr + m[:, None] * (N * D) + (stream * D + d)[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_GAMMA:
        gamma = tl.load(gamma_ptr + stream * D + d, mask=d < D, other=0.0).to(tl.float32)
        phi = phi * gamma[None, :]
    return phi


@triton.jit(do_not_specialize=["T", "M"])
def _project_kernel(
    x_ptr, phi_ptr, gamma_ptr, part_ptr, stride_xt, stride_xn, T,
    M, D, N: tl.constexpr, MP: tl.constexpr, SLICE_D: tl.constexpr, X_PARTS: tl.constexpr, LANES: tl.constexpr,
    HAS_GAMMA: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.program_id(1)
    stride_xn = int64_stride(stride_xn)
    rows = x_ptr + t.to(tl.int64)[:, None] * stride_xt
    acc = tl.zeros((BLOCK_T, MP), tl.float32)
    chunk = tl.zeros((BLOCK_T, MP), tl.float32)
    squares = tl.zeros((BLOCK_T, LANES), tl.float32)  # the lanes are added at the end: 116 us instead of 122
    squares_of_chunk = tl.zeros((BLOCK_T, LANES), tl.float32)
    for step in range(0, (SLICE_D // BLOCK_D) * N):
        stream = step % N
        d = s * SLICE_D + (step // N) * BLOCK_D + tl.arange(0, BLOCK_D)
        x = tl.load(rows + stream * stride_xn + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
        phi = load_phi(phi_ptr, gamma_ptr, stream, d, M, D, N, MP, HAS_GAMMA)
        # a chunk is BLOCK_D channels of every stream, which one program of few_tokens.py sums
        chunk = tl.where(stream == 0, 0.0, chunk)
        chunk += dot(split(x, X_PARTS, INTERPRET), transposed(split(phi, 3, INTERPRET)), INFINITE=True)
        squares_of_chunk = tl.where(stream == 0, 0.0, squares_of_chunk) + squares_by_lane(x, LANES)
        acc = tl.where(stream == N - 1, acc + chunk, acc)
        squares = tl.where(stream == N - 1, squares + squares_of_chunk, squares)
    m = tl.arange(0, MP)
    lane = tl.arange(0, LANES)
    base = part_ptr + s.to(tl.int64) * (M + LANES) * T
    tl.store(base + m[None, :] * T + t[:, None], acc, mask=(t < T)[:, None] & (m < M)[None, :])
    tl.store(base + (M + lane)[None, :] * T + t[:, None], squares, mask=(t < T)[:, None])


@triton.constexpr_function
def halvings(size):
    return size.bit_length() - 1


@triton.jit
def squares_by_lane(x, LANES: tl.constexpr):
    """Sums of squares over neighbours: [BLOCK_T, LANES]. The neighbours are added in pairs, since `tl.sum` over more
    than two has the order of the tile's layout, which depends on the alignment of the rows and on what else is loaded.
    """
    x = x.to(tl.float32)
    squares = tl.reshape(x * x, (x.shape[0], LANES, x.shape[1] // LANES))
    for _ in tl.static_range(halvings(squares.shape[2])):
        squares = tl.sum(tl.reshape(squares, (x.shape[0], LANES, squares.shape[2] // 2, 2)), axis=3)
    return tl.reshape(squares, (x.shape[0], LANES))


def project(x: Tensor, phi: Tensor, gamma: Tensor | None) -> Tensor:
    """Partial sums [slices, M + LANES, T] in float32 of x [T, n, D] times phi [M, n*D], and of the squares of x."""
    T, N, D = x.shape
    M = phi.shape[0]
    # 116 us at T = 8192, D = 4096 in bfloat16, 2.3 TB/s (H100); wider dtypes or more mixes need more shared memory
    light = x.element_size() == 2 and M <= 32
    block_t, stages = (128, 3) if light else (64, 2)
    block_d = CHUNK_D
    count, slice_d = cdiv(D, SLICE_D), min(SLICE_D, power_of_2(D, block_d))  # fewer steps if the only slice is not full
    part = torch.empty((count, M + LANES, T), dtype=torch.float32, device=x.device)
    run(
        _project_kernel, (cdiv(T, block_t), count),
        x, phi, phi if gamma is None else gamma, part, x.stride(0), x.stride(1), T, M, D, N, power_of_2(M, 16), slice_d,
        PARTS[x.dtype], LANES, gamma is not None, INTERPRET, block_t, block_d, num_warps=8 if light else 4,
        num_stages=stages, enable_fp_fusion=False, rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return part
