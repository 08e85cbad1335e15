"""The gradient of the streams: all terms added in one pass and rounded once.

    dx[j] = dm phi~[:, j] - kappa x[j] + h_pre[j] u + (G[j]  or  sum_k h_res[j, k] G[k])          phi~ = phi * gamma

The last term is the gradient that reaches x from outside pre. In `boundary` x is post's result and the term is its
gradient G. In a connection x is also post's input; the term is then post's share of dx, from the gradient G of x_next.
Elements moved per token at N = 4: 13D for x, u, G and dx.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, run
from .bfloat16_planes import load_planes, phi_planes
from .float32_products import dot, int64_stride

# Tiles of BLOCK_D per program. The loads of both tiles overlap through shared memory: 341 us at T = 8192, D = 4096,
# which is 13D at 2.6 TB/s; one tile takes 440 us, four 371, eight 409 (H100).
STEPS = 2
BLOCK_T = {1: 64, 2: 64, 3: 64, 4: 64, 8: 32}  # by n: more streams need more shared memory


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


@triton.jit(do_not_specialize=["T"])
def _gradient_kernel(
    x_ptr, u_ptr, grad_ptr, dm_ptr, kappa_ptr, h_pre_ptr, h_res_ptr, phi_ptr, dx_ptr,
    stride_xt, stride_xn, stride_ut, stride_gt, stride_gn, T,
    D, N: tl.constexpr, MP: tl.constexpr, DM_PLANES: tl.constexpr, PHI_PLANES: tl.constexpr,
    HAS_U: tl.constexpr, HAS_GRAD: tl.constexpr, MIX: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    m = tl.arange(0, MP)
    stride_xn, stride_gn = int64_stride(stride_xn), int64_stride(stride_gn)
    dm = load_planes(dm_ptr, t[:, None] * MP + m[None, :], T.to(tl.int64) * MP, (t < T)[:, None], DM_PLANES)
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


def stream_gradient(
    x: Tensor, dm: Tensor, kappa: Tensor, phi: Tensor, gamma: Tensor | None, *, u: Tensor | None = None,
    h_pre: Tensor | None = None, grad: Tensor | None = None, h_res: Tensor | None = None, orientation: str = "in_out",
) -> Tensor:  # fmt: skip
    """dx [T, n, D] in x's dtype from x [T, n, D], dm's planes [3, T, padded M] and kappa [T].

    u [T, D] with h_pre [T, n] adds the collapse's term; grad [T, n, D] is added directly, or mixed by h_res [T, n, n].
    """
    T, N, D = x.shape
    h_res = None if grad is None else h_res  # without a gradient there is nothing to mix
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    planes = phi_planes(phi, gamma, dm.shape[2], 3 if x.dtype == torch.float32 else 2)
    or_kappa = lambda v: kappa if v is None else v  # noqa: E731
    stride = lambda v, i: 0 if v is None else v.stride(i)  # noqa: E731
    block_d = 64 // x.element_size()
    run(
        _gradient_kernel, (cdiv(D, STEPS * block_d), cdiv(T, BLOCK_T[N])),
        x, or_kappa(u), or_kappa(grad), dm, kappa, or_kappa(h_pre), or_kappa(h_res), planes, dx,
        x.stride(0), x.stride(1), stride(u, 0), stride(grad, 0), stride(grad, 1), T, D, N, dm.shape[2],
        planes.shape[0], planes.shape[0], u is not None, grad is not None, h_res is not None, orientation == "out_in",
        D % (STEPS * block_d) == 0, BLOCK_T[N], block_d, STEPS, num_warps=4,
        rows=D | x.stride(0) | x.stride(1) | stride(u, 0) | stride(grad, 0) | stride(grad, 1),
    )  # fmt: skip
    return dx
