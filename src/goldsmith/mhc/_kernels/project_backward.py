"""The gradient through the projection, with everything else that is added to the streams' gradient, in one pass:

    g[j] = dm phi~[:, j] - kappa x[j] + h_pre[j] u + dx_post[j]                   float32, rounded once at the store
    Psi  = dm^T X                                                                partial sums over fixed chunks of tokens

dx_post[j] is nothing, or sum_k h_res[j, k] G[k] formed here from the gradient G of x_next (MIX). With POST, x itself came
out of x = post(x0, f): its gradient g (+ G) never reaches memory, but goes straight through post's backward:

    dx0[j] = sum_k h_res[j, k] g[k];   df = sum_k h_post[k] g[k];   dh_res[j, k] = <x0[j], g[k]>;   dh_post[k] = <g[k], f>

One program holds BLOCK_D of D, all streams of it, for one chunk of tokens: phi stays with it, and x is read once for both
products. Bytes a token in elements: 10D + 8D for MIX (x, u, G, dx at N = 4: 26D), 20D + 20D for POST.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRET, PARTS, power_of_2, run, token_chunks
from .numerics import dot
from .project import load_phi


@triton.jit
def load_tile(ptr, t, stride_t, d, live):
    return tl.load(ptr + t[:, None] * stride_t + d[None, :], mask=live, other=0.0)


@triton.jit
def load_column(ptr, t, stride_t, column, last):
    """One small number a token: [BLOCK_T, 1]."""
    return tl.load(ptr + t * stride_t + column, mask=t < last, other=0.0)[:, None]


@triton.jit
def coefficient(h_ptr, t, last, j, k, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """h_res[j, k] of each token, or h_res[k, j] ("out_in"): [BLOCK_T, 1]."""
    return load_column(h_ptr, t, N * N, k * N + j if TRANSPOSED else j * N + k, last)


@triton.jit
def own_gradient(
    x_ptr, u_ptr, dm, kappa, h_pre_ptr, phi_ptr, gamma_ptr, t, d, j, last, live, stride_xt, stride_xn, stride_ut,
    M, D: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, G_PARTS: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_U: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dm phi~[:, j] - kappa x[j] + h_pre[j] u"""
    phi = load_phi(phi_ptr, gamma_ptr, j, d, M, D, N, MP, HAS_GAMMA)
    g = dot(dm, phi, tl.zeros((BLOCK_T, BLOCK_D), tl.float32), G_PARTS, G_PARTS, INTERPRET)
    g -= kappa * load_tile(x_ptr + j * stride_xn, t, stride_xt, d, live).to(tl.float32)
    if HAS_U:
        g += load_column(h_pre_ptr, t, N, j, last) * load_tile(u_ptr, t, stride_ut, d, live).to(tl.float32)
    return g


@triton.jit(do_not_specialize=["T", "CHUNK"])
def _project_bwd_kernel(
    x_ptr, u_ptr, grad_ptr, dm_ptr, kappa_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, phi_ptr, gamma_ptr, x0_ptr, f_ptr,
    dx_ptr, df_ptr, dots_ptr, psi_ptr,
    stride_xt, stride_xn, stride_ut, stride_gt, stride_gn, stride_x0t, stride_x0n, stride_ft, T, CHUNK,
    M, D: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, X_PARTS: tl.constexpr, G_PARTS: tl.constexpr,
    HAS_GAMMA: tl.constexpr, HAS_U: tl.constexpr, HAS_GRAD: tl.constexpr, POST: tl.constexpr, TRANSPOSED: tl.constexpr,
    INTERPRET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    p = tl.program_id(1)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    m = tl.arange(0, MP)
    psi = ()
    for j in tl.static_range(N):
        psi = psi + (tl.zeros((BLOCK_D, MP), tl.float32),)
    last = tl.minimum((p + 1) * CHUNK, T)
    for start in range(p * CHUNK, last, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        live = (t < last)[:, None] & (d < D)[None, :]
        dm = tl.load(dm_ptr + t[:, None] * M + m[None, :], mask=(t < last)[:, None] & (m < M)[None, :], other=0.0)
        kappa = load_column(kappa_ptr, t, 1, 0, last)
        summed = ()
        for j in tl.static_range(N):
            x = load_tile(x_ptr + j * stride_xn, t, stride_xt, d, live)
            summed = summed + (dot(tl.trans(x), dm, psi[j], X_PARTS, 3, INTERPRET),)
        psi = summed
        out = t[:, None] * (N * D) + d[None, :]
        if POST:
            g = ()
            for j in tl.static_range(N):
                own = own_gradient(
                    x_ptr, u_ptr, dm, kappa, h_pre_ptr, phi_ptr, gamma_ptr, t, d, j, last, live, stride_xt, stride_xn,
                    stride_ut, M, D, N, MP, G_PARTS, HAS_GAMMA, HAS_U, INTERPRET, BLOCK_T, BLOCK_D,
                )  # fmt: skip
                if HAS_GRAD:
                    own += load_tile(grad_ptr + j * stride_gn, t, stride_gt, d, live).to(tl.float32)
                g = g + (own,)
            dots = dots_ptr + (block.to(tl.int64) * T + t) * (N * N + N)
            f = load_tile(f_ptr, t, stride_ft, d, live).to(tl.float32)
            df = load_column(h_post_ptr, t, N, 0, last) * g[0]
            tl.store(dots + N * N, tl.sum(g[0] * f, axis=1), mask=t < last)
            for k in tl.static_range(1, N):
                df += load_column(h_post_ptr, t, N, k, last) * g[k]
                tl.store(dots + N * N + k, tl.sum(g[k] * f, axis=1), mask=t < last)
            tl.store(df_ptr + t[:, None] * D + d[None, :], df, mask=live)
            for stream in range(N):  # not unrolled, here and below: unrolled, the tiles of all streams spill registers
                x0 = load_tile(x0_ptr + stream * stride_x0n, t, stride_x0t, d, live).to(tl.float32)
                dx = coefficient(h_res_ptr, t, last, stream, 0, N, TRANSPOSED) * g[0]
                tl.store(dots + (stream if TRANSPOSED else stream * N), tl.sum(x0 * g[0], axis=1), mask=t < last)
                for k in tl.static_range(1, N):
                    dx += coefficient(h_res_ptr, t, last, stream, k, N, TRANSPOSED) * g[k]
                    at = k * N + stream if TRANSPOSED else stream * N + k
                    tl.store(dots + at, tl.sum(x0 * g[k], axis=1), mask=t < last)
                tl.store(dx_ptr + out + stream * D, dx, mask=live)
        else:
            for stream in range(N):
                dx = own_gradient(
                    x_ptr, u_ptr, dm, kappa, h_pre_ptr, phi_ptr, gamma_ptr, t, d, stream, last, live, stride_xt, stride_xn,
                    stride_ut, M, D, N, MP, G_PARTS, HAS_GAMMA, HAS_U, INTERPRET, BLOCK_T, BLOCK_D,
                )  # fmt: skip
                if HAS_GRAD:  # each tile of G is read N times, but from the first-level cache but once
                    for k in tl.static_range(N):
                        grad = load_tile(grad_ptr + k * stride_gn, t, stride_gt, d, live).to(tl.float32)
                        dx += coefficient(h_res_ptr, t, last, stream, k, N, TRANSPOSED) * grad
                tl.store(dx_ptr + out + stream * D, dx, mask=live)
    for j in tl.static_range(N):
        at = psi_ptr + p.to(tl.int64) * M * (N * D) + m[None, :] * (N * D) + (j * D + d)[:, None]
        tl.store(at, psi[j], mask=(d < D)[:, None] & (m < M)[None, :])


def project_backward(
    x: Tensor, dm: Tensor, kappa: Tensor, phi: Tensor, gamma: Tensor | None, *, u: Tensor | None = None,
    h_pre: Tensor | None = None, grad: Tensor | None = None, h_res: Tensor | None = None, orientation: str = "in_out",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx [T, n, D] in x's dtype and Psi [P, M, n*D] in float32 for x [T, n, D], dm [T, M], kappa [T].

    u [T, D] with h_pre [T, n] adds the collapse; grad [T, n, D] with h_res [T, n, n] adds post's gradient.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    psi = _launch(x, dm, kappa, phi, gamma, u, h_pre, grad, None, h_res, orientation, None, None, dx, None, None)
    return dx, psi


def project_post_backward(
    y: Tensor, dm: Tensor, kappa: Tensor, phi: Tensor, gamma: Tensor | None, *, u: Tensor | None, h_pre: Tensor,
    grad: Tensor | None, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, orientation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, df, the partial dots [blocks of D, T, n*n + n] (dh_res, then dh_post) and Psi, for y = post(x, f)."""
    T, N, D = y.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    df = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    dots = torch.empty((triton.cdiv(D, block_d(D)), T, N * N + N), dtype=torch.float32, device=x.device)
    psi = _launch(y, dm, kappa, phi, gamma, u, h_pre, grad, h_post, h_res, orientation, x, f, dx, df, dots)
    return dx, df, dots, psi


def block_d(D: int) -> int:
    return min(64, power_of_2(D, 16))


def _launch(x, dm, kappa, phi, gamma, u, h_pre, grad, h_post, h_res, orientation, x0, f, dx, df, dots):
    T, N, D = x.shape
    M = phi.shape[0]
    P, chunk = token_chunks(T)
    psi = torch.empty((P, M, N * D), dtype=torch.float32, device=x.device)
    BLOCK_D = block_d(D)
    absent = dm
    given = lambda v: absent if v is None else v  # noqa: E731
    stride = lambda v, i: 0 if v is None else v.stride(i)  # noqa: E731
    run(
        _project_bwd_kernel, (triton.cdiv(D, BLOCK_D), P),
        x, given(u), given(grad), dm, kappa, given(h_pre), given(h_post), given(h_res), phi, given(gamma), given(x0),
        given(f), dx, given(df), given(dots), psi,
        x.stride(0), x.stride(1), stride(u, 0), stride(grad, 0), stride(grad, 1), stride(x0, 0), stride(x0, 1),
        stride(f, 0), T, chunk, M, D, N, power_of_2(M, 16), PARTS[x.dtype], 3 if x.dtype == torch.float32 else 2, gamma is not None, u is not None,
        grad is not None, x0 is not None, orientation == "out_in", INTERPRET, 64, BLOCK_D, num_warps=8, num_stages=2,
    )  # fmt: skip
    return psi
