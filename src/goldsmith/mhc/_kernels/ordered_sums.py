"""Sums over tokens, in two stages: partial sums of fixed chunks, which are then added in order, in float64.

The first stage here is Psi = dm^T X, which gives dphi = Psi * gamma and dgamma = sum_m Psi * phi. One program handles
BLOCK_D channels of one stream and one chunk of tokens. Traffic: x once (N*D elements per token), dm from the L2 cache,
and P * M * K * 4 bytes of partial sums in all. One launch does the second stage of all sums: the first programs compute
dalpha and dbias, each of the others a block of dphi.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .bfloat16_planes import load_planes
from .float32_products import dot, int64_stride, split, transposed
from .launch import INTERPRET, PARTS, token_chunks

WIDTH = 8  # columns of dbias per program: 6 us for 1024 rows, against 21 us in a single program (H100)


@triton.jit(do_not_specialize=["T", "CHUNK", "M"])
def _psi_kernel(
    x_ptr, dm_ptr, psi_ptr, stride_xt, stride_xn, T, CHUNK,
    M, D, N: tl.constexpr, MP: tl.constexpr, X_PARTS: tl.constexpr, DM_PLANES: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    j = block % N
    d = (block // N) * BLOCK_D + tl.arange(0, BLOCK_D)
    p = tl.program_id(1)
    stride_xn = int64_stride(stride_xn)
    m = tl.arange(0, MP)
    psi = tl.zeros(
        (BLOCK_D, MP), tl.float32
    )  # D first, so that wgmma can read x from shared memory in its original layout
    last = tl.minimum((p + 1) * CHUNK, T)
    for start in range(p * CHUNK, last, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        live = (t < last)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * stride_xt + j * stride_xn + d[None, :], mask=live, other=0.0)
        at = t[:, None] * MP + m[None, :]
        dm = load_planes(dm_ptr, at, T.to(tl.int64) * MP, (t < last)[:, None], DM_PLANES)
        psi += dot(transposed(split(x, X_PARTS, INTERPRET)), dm)
    at = psi_ptr + p.to(tl.int64) * M * (N * D) + m[:, None] * (N * D) + (j * D + d)[None, :]
    tl.store(at, tl.trans(psi), mask=(m < M)[:, None] & (d < D)[None, :])


def partial_psi(x: Tensor, dm: Tensor, M: int) -> Tensor:
    """Partial sums of Psi, [P, M, n*D] in float32, from x [T, n, D] and dm's planes [planes, T, padded M]."""
    T, N, D = x.shape
    P, chunk = token_chunks(T)
    psi = torch.empty((P, M, N * D), dtype=torch.float32, device=x.device)
    MP = dm.shape[2]
    light = x.element_size() == 2 and MP <= 32
    BLOCK_D = min(128 if light else 64, power_of_2(D, 16))
    run(
        _psi_kernel, (cdiv(D, BLOCK_D) * N, P),
        x, dm, psi, x.stride(0), x.stride(1), T, chunk, M, D, N, MP, PARTS[x.dtype], dm.shape[0], INTERPRET, 64,
        BLOCK_D, num_warps=4, num_stages=2,  # 107 us at T = 8192, D = 4096 in bfloat16, 2.5 TB/s (H100)
        rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return psi


@triton.jit
def finish_logits(sums_ptr, dbias_ptr, dalpha_ptr, pid, BLOCKS, M, N, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
                  WP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Programs 0..GROUPS-1 sum the columns of dl * z of a group to dalpha, the others WIDTH columns of dbias each."""
    c = tl.arange(0, WP)
    if pid < GROUPS:
        low = pid * N
        high = tl.where(pid == GROUPS - 1, M, low + N)
        base = sums_ptr + M
    else:
        low = (pid - GROUPS) * WIDTH
        high = tl.minimum(low + WIDTH, M)
        base = sums_ptr
    total = tl.zeros((BLOCK, WP), tl.float64)
    for start in range(0, BLOCKS, BLOCK):
        b = start + tl.arange(0, BLOCK)
        mask = (b < BLOCKS)[:, None] & (low + c < high)[None, :]
        total += tl.load(base + b[:, None] * (2 * M) + (low + c)[None, :], mask=mask, other=0.0).to(tl.float64)
    columns = tl.sum(total, axis=0)
    if pid < GROUPS:
        tl.store(dalpha_ptr + pid, tl.sum(columns, axis=0))
    else:
        tl.store(dbias_ptr + low + c, columns, mask=low + c < high)


@triton.jit
def finish_phi(psi_ptr, phi_ptr, gamma_ptr, dphi_ptr, dgamma_ptr, block, P, M, K, MP: tl.constexpr,
               HAS_GAMMA: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """dphi = Psi * gamma and dgamma = sum_m Psi * phi, for partial sums [P, M, K] of Psi = dm^T X."""
    m = tl.arange(0, MP)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (m < M)[:, None] & (k < K)[None, :]
    at = m[:, None] * K + k[None, :]
    psi = tl.zeros((MP, BLOCK_K), tl.float64)
    for p in range(0, P):
        psi += tl.load(psi_ptr + p * (M * K) + at, mask=mask, other=0.0).to(tl.float64)
    if HAS_GAMMA:
        gamma = tl.load(gamma_ptr + k, mask=k < K, other=0.0).to(tl.float64)
        phi = tl.load(phi_ptr + at, mask=mask, other=0.0).to(tl.float64)
        tl.store(dgamma_ptr + k, tl.sum(psi * phi, axis=0), mask=k < K)
        psi = psi * gamma[None, :]
    tl.store(dphi_ptr + at, psi, mask=mask)


@triton.jit(do_not_specialize=["P", "BLOCKS", "M", "N"])
def _finish_kernel(
    psi_ptr, sums_ptr, phi_ptr, gamma_ptr, dphi_ptr, dgamma_ptr, dbias_ptr, dalpha_ptr, P, BLOCKS, M, K, N,
    MP: tl.constexpr, HAS_GAMMA: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < FIRST:
        finish_logits(sums_ptr, dbias_ptr, dalpha_ptr, pid, BLOCKS, M, N, GROUPS, WIDTH, WP, BLOCK)
    else:
        finish_phi(psi_ptr, phi_ptr, gamma_ptr, dphi_ptr, dgamma_ptr, pid - FIRST, P, M, K, MP, HAS_GAMMA, BLOCK_K)


def finish(
    psi: Tensor, sums: Tensor, phi: Tensor, gamma: Tensor | None, alpha: Tensor, bias: Tensor, n: int
) -> dict[str, Tensor]:
    """dphi, dgamma (unless gamma is None), dbias, dalpha from psi [P, M, K] and sums [blocks, 2, M] of dl, dl * z."""
    P, M, K = psi.shape
    gradients = {"dphi": phi, "dgamma": gamma, "dbias": bias, "dalpha": alpha}
    gradients = {
        name: torch.empty(v.shape, dtype=v.dtype, device=v.device) for name, v in gradients.items() if v is not None
    }
    if P == 0:  # an empty sum is 0, even if gamma or phi holds a NaN
        return {name: v.zero_() for name, v in gradients.items()}
    groups, MP = alpha.numel(), power_of_2(M)
    block_k, wide = max(16, min(64, 4096 // MP)), power_of_2(max(WIDTH, M - (groups - 1) * n))
    first = groups + cdiv(M, WIDTH)
    run(
        _finish_kernel, (first + cdiv(K, block_k),),
        psi, sums, phi, phi if gamma is None else gamma, gradients["dphi"], gradients.get("dgamma", phi),
        gradients["dbias"], gradients["dalpha"], P, sums.shape[0], M, K, n, MP, gamma is not None, block_k, first,
        groups, WIDTH, wide, max(16, 8192 // wide), num_warps=8, rows=K,
    )  # fmt: skip
    return gradients
