"""The weighted sum over streams, h_in = sum_i h_pre[i] x[i], and the dots of its backward, dh_pre[i] = <u, x[i]>.

Each moves (N + 1) * D elements per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .float32_products import int64_stride


@triton.jit(do_not_specialize=["T"])
def _collapse_fwd_kernel(
    x_ptr, h_pre_ptr, h_in_ptr, stride_xt, stride_xn, T, D, N: tl.constexpr, BLOCK_D: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    stride_xn = int64_stride(stride_xn)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = ()
    h_pre = ()
    for i in tl.static_range(N):
        x = x + (tl.load(x_ptr + t * stride_xt + i * stride_xn + d, mask=d < D, other=0.0),)
        h_pre = h_pre + (tl.load(h_pre_ptr + t * N + i),)
    tl.store(h_in_ptr + t * D + d, weighted_sum(x, h_pre, N), mask=d < D)


@triton.jit
def weighted_sum(x, weights, N: tl.constexpr):
    """sum_i weights[i] x[i] of tuples, in float32."""
    total = weights[0] * x[0].to(tl.float32)
    for i in tl.static_range(1, N):
        total = tl.fma(weights[i], x[i].to(tl.float32), total)
    return total


def collapse(x: Tensor, h_pre: Tensor) -> Tensor:
    """h_in [T, D] in x's dtype from x [T, n, D] and h_pre [T, n]."""
    T, N, D = x.shape
    h_in = torch.empty((T, D), dtype=x.dtype, device=x.device)
    # the block size does not change the sums; with few tokens smaller blocks give more programs
    block = min(4096 if T > 64 else 512, power_of_2(D, 16))
    run(
        _collapse_fwd_kernel, (T, cdiv(D, block)),
        x, h_pre, h_in, x.stride(0), x.stride(1), T, D, N, block, num_warps=4, rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return h_in


@triton.jit(do_not_specialize=["T"])
def _collapse_dots_kernel(
    x_ptr, u_ptr, dh_pre_ptr, stride_xt, stride_xn, stride_ut, T, D,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    stride_xn = int64_stride(stride_xn)
    i = tl.arange(0, NP)
    total = tl.zeros((NP, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        u = tl.load(u_ptr + t * stride_ut + d, mask=d < D, other=0.0).to(tl.float32)
        mask = (i < N)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + t * stride_xt + i[:, None] * stride_xn + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += x * u[None, :]
    dots = tl.sum(total, axis=1)
    tl.store(dh_pre_ptr + t * N + i, dots, mask=i < N)


def collapse_dots(x: Tensor, u: Tensor) -> Tensor:
    """dh_pre[i] = <u, x[i]>: [T, n] in float32 from u [T, D] and x [T, n, D]."""
    T, N, D = x.shape
    out = torch.empty((T, N), dtype=torch.float32, device=x.device)
    block = min(1024, power_of_2(D, 16))
    run(
        _collapse_dots_kernel, (T,),
        x, u, out, x.stride(0), x.stride(1), u.stride(0), T, D, N, power_of_2(N), block, num_warps=4,
        rows=D | x.stride(0) | x.stride(1) | u.stride(0),
    )  # fmt: skip
    return out
