"""The ordered second stage of every sum over tokens: partial sums of fixed chunks, added in order in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import power_of_2, run


@triton.jit(do_not_specialize=["BLOCKS"])
def _finish_tokens_kernel(sums_ptr, dbias_ptr, dalpha_ptr, BLOCKS, M, N, GROUPS: tl.constexpr, MP: tl.constexpr,
                          BLOCK: tl.constexpr):  # fmt: skip
    m = tl.arange(0, MP)
    dbias = tl.zeros((MP,), tl.float64)
    scaled = tl.zeros((MP,), tl.float64)
    for start in range(0, BLOCKS, BLOCK):
        b = start + tl.arange(0, BLOCK)
        mask = (b < BLOCKS)[:, None] & (m < M)[None, :]
        at = sums_ptr + b[:, None] * (2 * M) + m[None, :]
        dbias += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float64), axis=0)
        scaled += tl.sum(tl.load(at + M, mask=mask, other=0.0).to(tl.float64), axis=0)
    tl.store(dbias_ptr + m, dbias, mask=m < M)
    for group in tl.static_range(GROUPS):
        low = group * N
        high = M if group == GROUPS - 1 else low + N
        tl.store(dalpha_ptr + group, tl.sum(tl.where((m >= low) & (m < high), scaled, 0.0), axis=0))


def finish_tokens(sums: Tensor, n: int, alpha: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """dbias [M] and dalpha [groups] from sums [blocks, 2, M] of dl and dl * z."""
    blocks, _, M = sums.shape
    dbias, dalpha = torch.empty(bias.shape, dtype=bias.dtype, device=sums.device), torch.empty_like(alpha)
    MP = power_of_2(M)
    run(
        _finish_tokens_kernel,
        (1,),
        sums,
        dbias,
        dalpha,
        blocks,
        M,
        n,
        alpha.numel(),
        MP,
        max(1, 2048 // MP),
        num_warps=4,
    )
    return dbias, dalpha


@triton.jit
def _finish_phi_kernel(
    psi_ptr, phi_ptr, gamma_ptr, dphi_ptr, dgamma_ptr, P, M, K,
    MP: tl.constexpr, HAS_GAMMA: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, MP)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
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


def finish_phi(psi: Tensor, phi: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """dphi = Psi * gamma and dgamma = sum_m Psi * phi, where Psi = dm^T X comes as partial sums [P, M, K]."""
    P, M, K = psi.shape
    dphi = torch.empty(phi.shape, dtype=phi.dtype, device=phi.device)
    dgamma = None if gamma is None else torch.empty(gamma.shape, dtype=gamma.dtype, device=gamma.device)
    if P == 0:  # a sum of nothing is 0, also beside a NaN in gamma or phi
        return dphi.zero_(), None if dgamma is None else dgamma.zero_()
    MP = power_of_2(M)
    block = max(16, min(128, 4096 // MP))
    run(
        _finish_phi_kernel, (triton.cdiv(K, block),),
        psi, phi, phi if gamma is None else gamma, dphi, phi if dgamma is None else dgamma, P, M, K,
        MP, gamma is not None, block, num_warps=4,
    )  # fmt: skip
    return dphi, dgamma
