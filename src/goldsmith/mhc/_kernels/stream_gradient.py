"""The gradients of the streams and of phi, in one launch: all terms of the streams' are added and rounded once.

    dx[j] = dm phi~[:, j] - kappa x[j] + h_pre[j] u + (G[j]  or  sum_k h_res[j, k] G[k])          phi~ = phi * gamma

The last term is the gradient that reaches x from outside pre. In `boundary` x is post's result and the term is its
gradient G. In a connection x is also post's input; the term is then post's share of dx, from the gradient G of x_next.
phi's is Psi = dm^T X, in partial sums of fixed chunks of tokens, which ordered_sums.py adds. The programs of a region,
a chunk of tokens and WIDE channels, are neighbours: first those of Psi, one for each stream and PSI_D channels, then
those of dx, which find x in the L2 cache.

Elements moved per token at N = 4: 13D for x, u, G and dx. Beside them P * M * K * 4 bytes of partial sums in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .bfloat16_planes import load_planes, phi_planes
from .float32_products import dot, int64_stride
from .launch import INTERPRET, PARTS, token_chunks
from .ordered_sums import sum_chunk

# Tiles of BLOCK_D per program. The loads of both tiles overlap through shared memory: 341 us at T = 8192, D = 4096,
# which is 13D at 2.6 TB/s; one tile takes 440 us, four 371, eight 409 (H100).
STEPS = 2
BLOCK_T = {1: 64, 2: 64, 3: 64, 4: 64, 8: 32}  # by n: more streams need more shared memory
WIDE = 128


@triton.jit
def load_tiles(ptr, t, stride_t, stride_n, d, live, N: tl.constexpr):
    """The tile at (t, d) of each stream, as a tuple of N."""
    tiles = ()
    for k in tl.static_range(N):
        tiles = tiles + (tl.load(ptr + k * stride_n + t[:, None] * stride_t + d[None, :], mask=live, other=0.0),)
    return tiles


@triton.jit
def load_columns(ptr, t, T, COUNT: tl.constexpr):
    """COUNT numbers per token, as a tuple of [BLOCK_T, 1]."""
    columns = ()
    for c in tl.static_range(COUNT):
        columns = columns + (tl.load(ptr + t * COUNT + c, mask=t < T, other=0.0)[:, None],)
    return columns


@triton.jit
def mixed(g, h_res, j, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """sum_k h_res[j, k] g[k]; with TRANSPOSED ("out_in") sum_k h_res[k, j] g[k]. g is a tuple of N tiles."""
    total = h_res[j if TRANSPOSED else j * N] * g[0].to(tl.float32)
    for k in tl.static_range(1, N):
        total = tl.fma(h_res[k * N + j if TRANSPOSED else j * N + k], g[k].to(tl.float32), total)
    return total


@triton.jit
def tile_gradient(
    x_ptr, u_ptr, grad_ptr, dm_ptr, kappa_ptr, h_pre_ptr, h_res_ptr, phi_ptr, dx_ptr,
    stride_xt, stride_xn, stride_ut, stride_gt, stride_gn, t, T, block,
    D, N: tl.constexpr, MP: tl.constexpr, PHI_PLANES: tl.constexpr,
    HAS_U: tl.constexpr, HAS_GRAD: tl.constexpr, MIX: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Stores dx of the tokens t and of STEPS tiles of BLOCK_D channels."""
    m = tl.arange(0, MP)
    dm = load_planes(dm_ptr, t[:, None] * MP + m[None, :], T.to(tl.int64) * MP, (t < T)[:, None], PHI_PLANES)
    kappa = load_columns(kappa_ptr, t, T, 1)[0]
    if HAS_U:
        h_pre = load_columns(h_pre_ptr, t, T, N)
    if MIX:
        h_res = load_columns(h_res_ptr, t, T, N * N)
    for step in tl.range(0, STEPS, num_stages=2):
        d = (block * STEPS + step) * BLOCK_D + tl.arange(0, BLOCK_D)
        live = (t < T)[:, None] if EVEN else (t < T)[:, None] & (d < D)[None, :]
        x = load_tiles(x_ptr, t, stride_xt, stride_xn, d, live, N)
        if HAS_GRAD:
            grads = load_tiles(grad_ptr, t, stride_gt, stride_gn, d, live, N)
        if HAS_U:
            u = load_tiles(u_ptr, t, stride_ut, 0, d, live, 1)[0].to(tl.float32)
        for j in tl.static_range(N):
            at = m[:, None] * (N * D) + (j * D + d)[None, :]
            g = dot(dm, load_planes(phi_ptr, at, MP * N * D, (d < D)[None, :], PHI_PLANES))
            g -= kappa * x[j].to(tl.float32)
            if HAS_U:
                g += h_pre[j] * u
            if MIX:
                g += mixed(grads, h_res, j, N, TRANSPOSED)
            elif HAS_GRAD:
                g += grads[j].to(tl.float32)
            tl.store(dx_ptr + t[:, None] * (N * D) + j * D + d[None, :], g, mask=live)


@triton.jit(do_not_specialize=["T", "CHUNK", "M"])
def _gradients_kernel(
    x_ptr, u_ptr, grad_ptr, dm_ptr, kappa_ptr, h_pre_ptr, h_res_ptr, phi_ptr, dx_ptr, psi_ptr,
    stride_xt, stride_xn, stride_ut, stride_gt, stride_gn, T, CHUNK, M,
    D, N: tl.constexpr, MP: tl.constexpr, X_PARTS: tl.constexpr, DM_PLANES: tl.constexpr, PHI_PLANES: tl.constexpr,
    HAS_U: tl.constexpr, HAS_GRAD: tl.constexpr, MIX: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr,
    INTERPRET: tl.constexpr, WIDE: tl.constexpr, PSI_T: tl.constexpr, PSI_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    OF_PSI: tl.constexpr = N * (WIDE // PSI_D)
    ACROSS: tl.constexpr = WIDE // (BLOCK_D * STEPS)
    per_region = OF_PSI + ACROSS * (CHUNK // BLOCK_T)
    region = tl.program_id(0) // per_region
    i = tl.program_id(0) % per_region
    p = tl.program_id(1)
    stride_xn, stride_gn = int64_stride(stride_xn), int64_stride(stride_gn)
    if i < OF_PSI:
        d = region * WIDE + (i // N) * PSI_D + tl.arange(0, PSI_D)
        sum_chunk(
            x_ptr, dm_ptr, psi_ptr, stride_xt, stride_xn, T, p, CHUNK, M, i % N, d, D,
            N, MP, X_PARTS, DM_PLANES, INTERPRET, PSI_T,
        )  # fmt: skip
    else:
        i -= OF_PSI
        t = (p * CHUNK + (i // ACROSS) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        tile_gradient(
            x_ptr, u_ptr, grad_ptr, dm_ptr, kappa_ptr, h_pre_ptr, h_res_ptr, phi_ptr, dx_ptr,
            stride_xt, stride_xn, stride_ut, stride_gt, stride_gn, t, T, region * ACROSS + i % ACROSS,
            D, N, MP, PHI_PLANES, HAS_U, HAS_GRAD, MIX, TRANSPOSED, EVEN, BLOCK_D, STEPS,
        )  # fmt: skip


def stream_and_phi_gradients(
    x: Tensor, dm: Tensor, kappa: Tensor, phi: Tensor, gamma: Tensor | None, *, u: Tensor | None = None,
    h_pre: Tensor | None = None, grad: Tensor | None = None, h_res: Tensor | None = None, orientation: str = "in_out",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx [T, n, D] in x's dtype and partial sums of Psi [P, M, n*D], from x [T, n, D], dm's planes and kappa [T].

    u [T, D] with h_pre [T, n] adds the collapse's term; grad [T, n, D] is added directly, or mixed by h_res [T, n, n].
    """
    T, N, D = x.shape
    M, MP = phi.shape[0], dm.shape[2]
    P, chunk = token_chunks(T)
    h_res = None if grad is None else h_res  # without a gradient there is nothing to mix
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    psi = torch.empty((P, M, N * D), dtype=torch.float32, device=x.device)
    planes = phi_planes(phi, gamma, MP, 3 if x.dtype == torch.float32 else 2)
    or_kappa = lambda v: kappa if v is None else v  # noqa: E731
    stride = lambda v, i: 0 if v is None else v.stride(i)  # noqa: E731
    block_t, block_d = BLOCK_T[N], 64 // x.element_size()
    wide = min(WIDE, power_of_2(D, STEPS * block_d))
    psi_d = min(128 if x.element_size() == 2 and MP <= 32 else 64, wide)
    per_region = N * (wide // psi_d) + wide // (STEPS * block_d) * (chunk // block_t)
    run(
        _gradients_kernel, (cdiv(D, wide) * per_region, P),
        x, or_kappa(u), or_kappa(grad), dm, kappa, or_kappa(h_pre), or_kappa(h_res), planes, dx, psi,
        x.stride(0), x.stride(1), stride(u, 0), stride(grad, 0), stride(grad, 1), T, chunk, M, D, N, MP,
        PARTS[x.dtype], dm.shape[0], planes.shape[0], u is not None, grad is not None, h_res is not None,
        orientation == "out_in", D % wide == 0, INTERPRET, wide, 64, psi_d, block_t, block_d, STEPS, num_warps=4,
        num_stages=2, rows=D | x.stride(0) | x.stride(1) | stride(u, 0) | stride(grad, 0) | stride(grad, 1),
    )  # fmt: skip
    return dx, psi
