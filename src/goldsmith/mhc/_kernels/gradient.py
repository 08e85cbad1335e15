"""The gradient of the streams, all its addends in one pass and rounded once:

    g[j] = dm phi~[:, j] - kappa x[j] + h_pre[j] u + dx_post[j]

dx_post[j] is nothing, or sum_k h_res[j, k] G[k] formed here from the gradient G of post's result (MIX). With POST, x itself
came out of x = post(x0, f): its gradient g (+ G) never reaches memory, but goes straight through post's backward:

    dx0[j] = sum_k h_res[j, k] g[k];   df = sum_k h_post[k] g[k];   dh_res[j, k] = <x0[j], g[k]>;   dh_post[k] = <g[k], f>

Bytes a token in elements at N = 4: 13D with MIX (x, u, G, dx), 19D with POST and the partial dots beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRET, power_of_2, run
from .numerics import dot
from .project import load_phi


@triton.jit
def load_tile(ptr, t, stride_t, d, live):
    return tl.load(ptr + t[:, None] * stride_t + d[None, :], mask=live, other=0.0)


@triton.jit
def load_column(ptr, t, stride_t, column, T):
    """One small number a token: [BLOCK_T, 1]."""
    return tl.load(ptr + t * stride_t + column, mask=t < T, other=0.0)[:, None]


@triton.jit
def mixed(g, h_res_ptr, t, T, j, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """sum_k h_res[j, k] g[k]; with TRANSPOSED ("out_in") sum_k h_res[k, j] g[k]. g is a tuple of N tiles."""
    total = load_column(h_res_ptr, t, N * N, j if TRANSPOSED else j * N, T) * g[0].to(tl.float32)
    for k in tl.static_range(1, N):
        total += load_column(h_res_ptr, t, N * N, k * N + j if TRANSPOSED else j * N + k, T) * g[k].to(tl.float32)
    return total


@triton.jit(do_not_specialize=["T"])
def _gradient_kernel(
    x_ptr, u_ptr, grad_ptr, dm_ptr, kappa_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, phi_ptr, gamma_ptr, x0_ptr, f_ptr,
    dx_ptr, df_ptr, dots_ptr,
    stride_xt, stride_xn, stride_ut, stride_gt, stride_gn, stride_x0t, stride_x0n, stride_ft, T,
    M, D: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, PARTS: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_U: tl.constexpr, HAS_GRAD: tl.constexpr, POST: tl.constexpr, TRANSPOSED: tl.constexpr,
    INTERPRET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    m = tl.arange(0, MP)
    live = (t < T)[:, None] & (d < D)[None, :]
    # every tile is asked for before the first is used: 437 us instead of 741 at T = 8192, D = 4096 (H100)
    x = ()
    for k in tl.static_range(N):
        x = x + (load_tile(x_ptr + k * stride_xn, t, stride_xt, d, live),)
    grads = ()
    if HAS_GRAD:
        for k in tl.static_range(N):
            grads = grads + (load_tile(grad_ptr + k * stride_gn, t, stride_gt, d, live),)
    if HAS_U:
        u = load_tile(u_ptr, t, stride_ut, d, live)
    dm = tl.load(dm_ptr + t[:, None] * M + m[None, :], mask=(t < T)[:, None] & (m < M)[None, :], other=0.0)
    kappa = load_column(kappa_ptr, t, 1, 0, T)
    through = ()
    for j in tl.static_range(N):
        phi = load_phi(phi_ptr, gamma_ptr, j, d, M, D, N, MP, HAS_GAMMA)
        g = dot(dm, phi, PARTS, PARTS, INTERPRET)
        g -= kappa * x[j].to(tl.float32)
        if HAS_U:
            g += load_column(h_pre_ptr, t, N, j, T) * u.to(tl.float32)
        if POST:
            if HAS_GRAD:
                g += grads[j].to(tl.float32)
            through = through + (g,)
        else:
            if HAS_GRAD:
                g += mixed(grads, h_res_ptr, t, T, j, N, TRANSPOSED)
            tl.store(dx_ptr + t[:, None] * (N * D) + j * D + d[None, :], g, mask=live)
    if POST:
        dots = dots_ptr + (block.to(tl.int64) * T + t) * (N * N + N)
        f = load_tile(f_ptr, t, stride_ft, d, live).to(tl.float32)
        df = load_column(h_post_ptr, t, N, 0, T) * through[0]
        tl.store(dots + N * N, tl.sum(through[0] * f, axis=1), mask=t < T)
        for k in tl.static_range(1, N):
            df += load_column(h_post_ptr, t, N, k, T) * through[k]
            tl.store(dots + N * N + k, tl.sum(through[k] * f, axis=1), mask=t < T)
        tl.store(df_ptr + t[:, None] * D + d[None, :], df, mask=live)
        for j in tl.static_range(N):
            dx = mixed(through, h_res_ptr, t, T, j, N, TRANSPOSED)
            tl.store(dx_ptr + t[:, None] * (N * D) + j * D + d[None, :], dx, mask=live)
            x0 = load_tile(x0_ptr + j * stride_x0n, t, stride_x0t, d, live).to(tl.float32)
            for k in tl.static_range(N):
                tl.store(dots + (k * N + j if TRANSPOSED else j * N + k), tl.sum(x0 * through[k], axis=1), mask=t < T)


def stream_gradient(
    x: Tensor, dm: Tensor, kappa: Tensor, phi: Tensor, gamma: Tensor | None, *, u: Tensor | None = None,
    h_pre: Tensor | None = None, grad: Tensor | None = None, h_res: Tensor | None = None, orientation: str = "in_out",
) -> Tensor:  # fmt: skip
    """dx [T, n, D] in x's dtype for x [T, n, D], dm [T, M], kappa [T].

    u [T, D] with h_pre [T, n] adds the collapse; grad [T, n, D] with h_res [T, n, n] adds post's gradient.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, dm, kappa, phi, gamma, u, h_pre, grad, None, h_res, orientation, None, None, dx, None, None, block_d(x.shape[2]))
    return dx


def stream_gradient_through_post(
    y: Tensor, dm: Tensor, kappa: Tensor, phi: Tensor, gamma: Tensor | None, *, u: Tensor | None, h_pre: Tensor,
    grad: Tensor | None, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, orientation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, df, dh_res, dh_post for y = post(x, f, h_post, h_res)."""
    T, N, D = y.shape
    BLOCK_D = block_d(D)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    df = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    dots = torch.empty((triton.cdiv(D, BLOCK_D), T, N * N + N), dtype=torch.float32, device=x.device)
    _launch(y, dm, kappa, phi, gamma, u, h_pre, grad, h_post, h_res, orientation, x, f, dx, df, dots, BLOCK_D)
    return dx, df, *finish_dots(dots, N)


def block_d(D: int) -> int:
    return min(32, power_of_2(D, 16))


def _launch(x, dm, kappa, phi, gamma, u, h_pre, grad, h_post, h_res, orientation, x0, f, dx, df, dots, BLOCK_D):
    T, N, D = x.shape
    M = phi.shape[0]
    BLOCK_T = 64 if N <= 4 else 32
    given = lambda v: dm if v is None else v  # noqa: E731
    stride = lambda v, i: 0 if v is None else v.stride(i)  # noqa: E731
    run(
        _gradient_kernel, (triton.cdiv(D, BLOCK_D), triton.cdiv(T, BLOCK_T)),
        x, given(u), given(grad), dm, kappa, given(h_pre), given(h_post), given(h_res), phi, given(gamma), given(x0),
        given(f), dx, given(df), given(dots),
        x.stride(0), x.stride(1), stride(u, 0), stride(grad, 0), stride(grad, 1), stride(x0, 0), stride(x0, 1),
        stride(f, 0), T, M, D, N, power_of_2(M, 16), 3 if x.dtype == torch.float32 else 2, gamma is not None,
        u is not None, grad is not None, x0 is not None, orientation == "out_in", INTERPRET, BLOCK_T, BLOCK_D,
        num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _finish_dots_kernel(dots_ptr, dh_res_ptr, dh_post_ptr, T, BLOCKS, N: tl.constexpr, CP: tl.constexpr,
                        BLOCK_T: tl.constexpr):  # fmt: skip
    C: tl.constexpr = N * N + N
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    c = tl.arange(0, CP)[None, :]
    live = (t < T) & (c < C)
    total = tl.zeros((BLOCK_T, CP), tl.float32)
    step = T.to(tl.int64) * C
    for block in range(0, BLOCKS):
        total += tl.load(dots_ptr + block * step + t * C + c, mask=live, other=0.0)
    tl.store(dh_res_ptr + t * (N * N) + c, total, mask=live & (c < N * N))
    tl.store(dh_post_ptr + t * N + c - N * N, total, mask=live & (c >= N * N))


def finish_dots(dots: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """dh_res [T, n, n] and dh_post [T, n] from the partial dots of all blocks of D, added in order."""
    blocks, T, C = dots.shape
    dh_res = torch.empty((T, n, n), dtype=torch.float32, device=dots.device)
    dh_post = torch.empty((T, n), dtype=torch.float32, device=dots.device)
    run(
        _finish_dots_kernel, (triton.cdiv(T, 32),), dots, dh_res, dh_post, T, blocks, n, power_of_2(C), 32, num_warps=4
    )
    return dh_res, dh_post
