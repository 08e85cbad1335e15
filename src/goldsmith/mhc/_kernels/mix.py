"""x_next = mixed streams + injected layer output, and its backward; one program per token reads each stream once.

Elements moved per token: the forward reads N*D + D and writes N*D (9D at N = 4); the backward reads x, G and f and
writes df and, if needed, dx: 14D, or 10D without dx.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .float32_products import int64_stride


@triton.jit(do_not_specialize=["T"])
def _mix_fwd_kernel(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, y_ptr, stride_xt, stride_xn, stride_ft, T, D,
    N: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    stride_xn = int64_stride(stride_xn)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = ()
    for j in tl.static_range(N):
        x = x + (tl.load(x_ptr + t * stride_xt + j * stride_xn + d, mask=d < D, other=0.0),)
    f = tl.load(f_ptr + t * stride_ft + d, mask=d < D, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        y = tl.fma(tl.load(h_post_ptr + t * N + k), f, mixed_row(x, h_res_ptr + t * (N * N), k, N, TRANSPOSED))
        tl.store(y_ptr + t * (N * D) + k * D + d, y, mask=d < D)


@triton.jit
def mixed_row(x, h_ptr, k, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """sum_j h[j, k] x[j]; with TRANSPOSED sum_j h[k, j] x[j]. x is a tuple of N rows."""
    total = tl.load(h_ptr + (k * N if TRANSPOSED else k)) * x[0].to(tl.float32)
    for j in tl.static_range(1, N):
        total = tl.fma(tl.load(h_ptr + (k * N + j if TRANSPOSED else j * N + k)), x[j].to(tl.float32), total)
    return total


def mix_forward(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, orientation: str) -> Tensor:
    """x_next [T, n, D] in x's dtype from x [T, n, D], f [T, D], h_post [T, n], h_res [T, n, n]."""
    T, N, D = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(4096 if N <= 4 and x.element_size() == 2 else 1024, power_of_2(D, 16))
    run(
        _mix_fwd_kernel, (T, cdiv(D, block)),
        x, f, h_post, h_res, y, x.stride(0), x.stride(1), f.stride(0), T, D, N, orientation == "out_in", block,
        num_warps=8, rows=D | x.stride(0) | x.stride(1) | f.stride(0),
    )  # fmt: skip
    return y


@triton.jit
def partial_dot(a, b, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr):
    """a * b summed over runs of VECTOR neighbours, which one thread holds: [BLOCK_D // VECTOR]."""
    return tl.sum(tl.reshape(a * b, (BLOCK_D // VECTOR, VECTOR)), axis=1)


@triton.jit(do_not_specialize=["T"])
def _mix_bwd_kernel(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, grad_ptr, dx_ptr, df_ptr, dh_post_ptr, dh_res_ptr,
    stride_xt, stride_xn, stride_ft, stride_gt, stride_gn, T, D,
    N: tl.constexpr, TRANSPOSED: tl.constexpr, NEEDS_DX: tl.constexpr, VECTOR: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    stride_xn, stride_gn = int64_stride(stride_xn), int64_stride(stride_gn)
    LANES: tl.constexpr = BLOCK_D // VECTOR
    dots = ()
    for _ in tl.static_range(N * N + N):
        dots = dots + (tl.zeros((LANES,), tl.float32),)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        g = ()
        for k in tl.static_range(N):
            g = g + (tl.load(grad_ptr + t * stride_gt + k * stride_gn + d, mask=d < D, other=0.0),)
        f = tl.load(f_ptr + t * stride_ft + d, mask=d < D, other=0.0).to(tl.float32)
        df = tl.load(h_post_ptr + t * N) * g[0].to(tl.float32)
        for k in tl.static_range(1, N):
            df += tl.load(h_post_ptr + t * N + k) * g[k].to(tl.float32)
        tl.store(df_ptr + t * D + d, df, mask=d < D)
        new = ()
        for j in tl.static_range(N):
            x = tl.load(x_ptr + t * stride_xt + j * stride_xn + d, mask=d < D, other=0.0).to(tl.float32)
            for k in tl.static_range(N):
                new = new + (dots[j * N + k] + partial_dot(x, g[k].to(tl.float32), BLOCK_D, VECTOR),)
        for k in tl.static_range(N):
            new = new + (dots[N * N + k] + partial_dot(f, g[k].to(tl.float32), BLOCK_D, VECTOR),)
        dots = new
        if NEEDS_DX:
            for j in tl.static_range(N):
                # the transposed sum of the forward: dx[j] = sum_k h[j, k] g[k]
                dx = mixed_row(g, h_res_ptr + t * (N * N), j, N, not TRANSPOSED)
                tl.store(dx_ptr + t * (N * D) + j * D + d, dx, mask=d < D)
    for j in tl.static_range(N):
        for k in tl.static_range(N):
            at = k * N + j if TRANSPOSED else j * N + k
            tl.store(dh_res_ptr + t * (N * N) + at, tl.sum(dots[j * N + k], axis=0))
    for k in tl.static_range(N):
        tl.store(dh_post_ptr + t * N + k, tl.sum(dots[N * N + k], axis=0))


def mix_backward(
    grad: Tensor, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, orientation: str, *, needs_dx: bool = True
) -> dict[str, Tensor]:
    """{x, f, h_post, h_res: gradient} for grad = dL/dx_next [T, n, D]; x only with needs_dx."""
    T, N, D = x.shape
    new = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=x.device)  # noqa: E731
    out = {"f": new((T, D), f.dtype), "h_post": new((T, N), torch.float32), "h_res": new((T, N, N), torch.float32)}
    if needs_dx:
        out["x"] = new((T, N, D), x.dtype)
    vector = 8 if x.element_size() == 2 else 4
    # 240 us (2.8 TB/s) without dx at T = 8192, D = 4096 (H100)
    block = min(512 if x.element_size() == 2 and N <= 4 else 128, power_of_2(D, 16))
    run(
        _mix_bwd_kernel, (T,),
        x, f, h_post, h_res, grad, out.get("x", out["f"]), out["f"], out["h_post"], out["h_res"],
        x.stride(0), x.stride(1), f.stride(0), grad.stride(0), grad.stride(1), T, D, N, orientation == "out_in",
        needs_dx, vector, block, num_warps=1,
        rows=D | x.stride(0) | x.stride(1) | f.stride(0) | grad.stride(0) | grad.stride(1),
    )  # fmt: skip
    return out
