"""From a token's mixes to its coefficients (sigmoids, Sinkhorn), and from their gradients to those of the mixes.

A token's numbers stay in registers as [BLOCK_T, NP] and [BLOCK_T, NP, NP] tiles; memory traffic is only the inputs and
results. GROUPS of mixes: 1 in a head (pre), 2 in an independent connection (pre, post), otherwise 3 (pre, post, res).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.arithmetic import sigmoid
from ...core._kernels.launch import ONE_SUM_FOR_ALL_LANES, cdiv, power_of_2, run
from .bfloat16_planes import new_planes, store_planes
from .launch import INTERPRET
from .sinkhorn import grid, sinkhorn, sinkhorn_backward

BLOCK_T = 8
TOKENS = 32  # one per thread in the forward


@triton.jit
def gather(pointers, mask, stride_slice, SLICES: tl.constexpr):
    """Partial sums, with their slices added in order."""
    total = tl.load(pointers, mask=mask, other=0.0)
    for s in tl.static_range(1, SLICES):  # unrolled, so that the loads of all slices are in flight together
        total += tl.load(pointers + s * stride_slice, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["T", "iterations", "K", "store_logits"])
def _coefficients_fwd_kernel(
    part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, inv_rms_ptr, h_mix_ptr, logits_ptr, T,
    rms_eps, pre_eps, post_mult, post_eps, iterations, sinkhorn_eps, K, store_logits,
    N: tl.constexpr, ROW: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    SINKHORN: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    M: tl.constexpr = 2 * N + N * N if GROUPS == 3 else GROUPS * N
    row = tl.arange(0, ROW)
    at = t[:, None] + (row * T)[None, :]
    mix = gather(part_ptr + at, (t < T)[:, None] & (row < M + LANES)[None, :], T.to(tl.int64) * (M + LANES), SLICES)
    inv_rms = inverse_rms(mix, row, K, rms_eps, M, LANES)
    live = (t < T)[:, None] & (row < M)[None, :]
    columns = t[:, None] * M + row[None, :]
    tl.store(inv_rms_ptr + t, inv_rms, mask=t < T)
    tl.store(h_mix_ptr + columns, mix, mask=live)
    alpha = tl.load(alpha_ptr + tl.minimum(row // N, GROUPS - 1), mask=row < M, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + row, mask=row < M, other=0.0).to(tl.float32)
    logit = tl.fma(alpha[None, :], mix * inv_rms[:, None], bias[None, :])
    tl.store(logits_ptr + columns, logit, mask=live & (store_logits > 0))
    s = sigmoid(logit)
    tl.store(h_pre_ptr + t[:, None] * N + row[None, :], s + pre_eps, mask=live & (row < N)[None, :])
    if GROUPS > 1:
        of_post = live & ((row >= N) & (row < 2 * N))[None, :]
        tl.store(h_post_ptr + t[:, None] * N + row[None, :] - N, post_mult * s + post_eps, mask=of_post)
    if GROUPS > 2:
        result = ()
        for c in tl.static_range(N * N):
            result = result + (column(logit, row, 2 * N + c),)
        if SINKHORN:
            result = sinkhorn(result, iterations, sinkhorn_eps, N)
        h_res = filled(tl.zeros_like(logit), row, 2 * N, result, N * N)
        tl.store(h_res_ptr + t[:, None] * (N * N) + row[None, :] - 2 * N, h_res, mask=live & (row >= 2 * N)[None, :])


@triton.jit
def filled(tile, row, first, values, COUNT: tl.constexpr):
    """A tile, or a vector, with `values` in the columns from `first`, for one store: many make the compiler slow."""
    for i in tl.static_range(COUNT):
        value = values[i] if len(tile.shape) == 1 else tl.expand_dims(values[i], 1)
        tile = tl.where(row == first + i, value, tile)
    return tile


@triton.jit
def column(tile, row, i):
    """Column i of a tile, or element i of a vector, without arithmetic: -0.0 + v is v."""
    return tl.sum(tl.where(row == i, tile, -0.0), axis=len(tile.shape) - 1)


@triton.jit
def inverse_rms(mix, row, K, rms_eps, M: tl.constexpr, LANES: tl.constexpr):
    """rsqrt(mean(x^2) + rms_eps) of the sums of squares in the LANES columns behind the mixes."""
    squares = column(mix, row, M)
    for lane in tl.static_range(1, LANES):
        squares += column(mix, row, M + lane)
    return tl.rsqrt(squares / K + rms_eps)


def coefficients_forward(
    part: Tensor, alpha: Tensor, bias: Tensor, n: int, K: int, *, rms_eps: float, pre_eps: float,
    post_mult: float = 1.0, post_eps: float = 0.0, iterations: int = 1, sinkhorn_eps: float = 0.0,
    sinkhorn: bool = True, logits: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """h_pre, h_post, h_res, inv_rms, h_mix (flat over tokens, float32) from partial sums [slices, M + lanes, T]."""
    count, rows, T = part.shape
    M, groups = bias.numel(), alpha.numel()
    out = new_coefficients((T,), n, M, groups, part.device, logits=logits)
    absent = out["h_pre"]
    run(
        _coefficients_fwd_kernel, (cdiv(T, TOKENS),),
        part, alpha, bias, out["h_pre"], out.get("h_post", absent), out.get("h_res", absent), out["inv_rms"],
        out["h_mix"], out.get("logits", absent), T, rms_eps, pre_eps, post_mult, post_eps, iterations, sinkhorn_eps, K,
        int(logits), n, power_of_2(rows), count, rows - M, groups, sinkhorn, TOKENS, num_warps=1,
        **ONE_SUM_FOR_ALL_LANES,
    )  # fmt: skip
    return out


def new_coefficients(
    batch: Sequence[int], n: int, M: int, groups: int, device: torch.device, *, logits: bool, h_pre: bool = True
) -> dict[str, Tensor]:
    """Memory for the coefficients of the tokens of a batch, by name."""
    new = lambda *shape: torch.empty((*batch, *shape), dtype=torch.float32, device=device)  # noqa: E731
    out = {"inv_rms": new(), "h_mix": new(M)}
    if h_pre:
        out["h_pre"] = new(n)
    if groups > 1:
        out["h_post"] = new(n)
    if groups > 2:
        out["h_res"] = new(n, n)
    if logits:
        out["logits"] = new(M)
    return out


@triton.jit(do_not_specialize=["T", "iterations", "K", "store_dlogits"])
def _coefficients_bwd_kernel(
    dh_pre_ptr, dh_post_ptr, dh_res_ptr, h_mix_ptr, inv_rms_ptr, alpha_ptr, bias_ptr,
    dm_ptr, kappa_ptr, h_pre_ptr, sums_ptr, dlogits_ptr, scratch_ptr, T,
    pre_eps, post_mult, iterations, sinkhorn_eps, K, store_dlogits,
    N: tl.constexpr, NP: tl.constexpr, GROUPS: tl.constexpr, SINKHORN: tl.constexpr, HAS_PRE: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, MP: tl.constexpr, PAD: tl.constexpr,
    PLANES: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    t = (pid * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    M: tl.constexpr = 2 * N + N * N if GROUPS == 3 else GROUPS * N
    inv_rms = tl.load(inv_rms_ptr + t, mask=t < T, other=0.0)
    sums = sums_ptr + pid * (2 * M)
    plane = T.to(tl.int64) * MP
    beyond = M + tl.arange(0, PAD)[None, :]
    nothing = tl.zeros((BLOCK_T, PAD), tl.float32)
    padding = (t < T)[:, None] & (beyond < MP)
    store_planes(dm_ptr, t[:, None] * MP + beyond, plane, nothing, padding, PLANES, INTERPRET)

    i = tl.arange(0, NP)[None, :]
    live = (t < T)[:, None] & (i < N)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    z = tl.load(h_mix_ptr + t[:, None] * M + i, mask=live, other=0.0) * inv_rms[:, None]
    s = sigmoid(alpha * z + tl.load(bias_ptr + i, mask=i < N, other=0.0).to(tl.float32))
    tl.store(h_pre_ptr + t[:, None] * N + i, s + pre_eps, mask=live)
    dot = tl.zeros((BLOCK_T,), tl.float32)
    if HAS_PRE:
        dl = tl.load(dh_pre_ptr + t[:, None] * N + i, mask=live, other=0.0) * (s * (1.0 - s))
        dl = tl.where(live, dl, 0.0)  # past the last token s is NaN when alpha or bias is infinite
    else:
        dl = tl.zeros((BLOCK_T, NP), tl.float32)
    tl.store(dlogits_ptr + t[:, None] * M + i, dl, mask=live & (store_dlogits > 0))
    store_planes(dm_ptr, t[:, None] * MP + i, plane, inv_rms[:, None] * (alpha * dl), live, PLANES, INTERPRET)
    dot += tl.sum(alpha * dl * z, axis=1)
    column = tl.arange(0, NP)
    tl.store(sums + column, tl.sum(dl, axis=0), mask=column < N)
    tl.store(sums + M + column, tl.sum(dl * z, axis=0), mask=column < N)
    if GROUPS > 1:
        alpha = tl.load(alpha_ptr + 1).to(tl.float32)
        z = tl.load(h_mix_ptr + t[:, None] * M + N + i, mask=live, other=0.0) * inv_rms[:, None]
        if HAS_POST:
            s = sigmoid(alpha * z + tl.load(bias_ptr + N + i, mask=i < N, other=0.0).to(tl.float32))
            dl = tl.load(dh_post_ptr + t[:, None] * N + i, mask=live, other=0.0) * (post_mult * (s * (1.0 - s)))
            dl = tl.where(live, dl, 0.0)
        else:
            dl = tl.zeros((BLOCK_T, NP), tl.float32)
        tl.store(dlogits_ptr + t[:, None] * M + N + i, dl, mask=live & (store_dlogits > 0))
        dm = inv_rms[:, None] * (alpha * dl)
        store_planes(dm_ptr, t[:, None] * MP + N + i, plane, dm, live, PLANES, INTERPRET)
        dot += tl.sum(alpha * dl * z, axis=1)
        tl.store(sums + N + column, tl.sum(dl, axis=0), mask=column < N)
        tl.store(sums + M + N + column, tl.sum(dl * z, axis=0), mask=column < N)
    if GROUPS > 2:
        j, k, inside = grid(N, NP)
        t3 = t[:, None, None]
        live3 = (t3 < T) & inside
        row = 2 * N + j * N + k
        alpha = tl.load(alpha_ptr + 2).to(tl.float32)
        z = tl.load(h_mix_ptr + t3 * M + row, mask=live3, other=0.0) * inv_rms[:, None, None]
        if HAS_RES:
            dl = tl.load(dh_res_ptr + t3 * (N * N) + j * N + k, mask=live3, other=0.0)
            if SINKHORN:
                logits = alpha * z + tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
                step = T.to(tl.int64) * N
                dl = sinkhorn_backward(
                    dl, logits, inside, j, k, scratch_ptr, step, t3, t3 < T, iterations, sinkhorn_eps, N
                )
                dl = tl.where(live3, dl, 0.0)
        else:
            dl = tl.zeros((BLOCK_T, NP, NP), tl.float32)
        tl.store(dlogits_ptr + t3 * M + row, dl, mask=live3 & (store_dlogits > 0))
        dm = inv_rms[:, None, None] * (alpha * dl)
        store_planes(dm_ptr, t3 * MP + row, plane, dm, live3, PLANES, INTERPRET)
        dot += tl.sum(tl.sum(alpha * dl * z, axis=2), axis=1)
        pair = tl.arange(0, NP)[:, None] * N + tl.arange(0, NP)[None, :]
        exists = (tl.arange(0, NP)[:, None] < N) & (tl.arange(0, NP)[None, :] < N)
        tl.store(sums + 2 * N + pair, tl.sum(dl, axis=0), mask=exists)
        tl.store(sums + M + 2 * N + pair, tl.sum(dl * z, axis=0), mask=exists)
    tl.store(kappa_ptr + t, dot * inv_rms * inv_rms / K, mask=t < T)


def coefficients_backward(
    dh_pre: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None, h_mix: Tensor, inv_rms: Tensor, alpha: Tensor,
    bias: Tensor, n: int, K: int, *, pre_eps: float, post_mult: float = 1.0, iterations: int = 1,
    sinkhorn_eps: float = 0.0, sinkhorn: bool = True, dlogits: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """dm as planes [3, T, padded M], kappa [T], h_pre [T, n], and sums [blocks, 2, M] of dl and dl * z per 8 tokens."""
    T, M = h_mix.shape
    MP = power_of_2(M, 16)
    blocks, groups = cdiv(T, BLOCK_T), alpha.numel()
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=h_mix.device)  # noqa: E731
    dm = new_planes(3, T, MP, device=h_mix.device)
    out = {"dm": dm, "kappa": new(T), "h_pre": new(T, n), "sums": new(blocks, 2, M)}
    if dlogits:
        out["dlogits"] = new(T, M)
    scratch = new(2 * iterations if groups > 2 and sinkhorn else 0, T, n)
    absent = out["kappa"]
    or_absent = lambda v: absent if v is None else v  # noqa: E731
    run(
        _coefficients_bwd_kernel, (blocks,),
        or_absent(dh_pre), or_absent(dh_post), or_absent(dh_res), h_mix, inv_rms, alpha, bias,
        dm, out["kappa"], out["h_pre"], out["sums"], out.get("dlogits", absent), scratch, T,
        pre_eps, post_mult, iterations, sinkhorn_eps, K, int(dlogits),
        n, power_of_2(n), groups, sinkhorn, dh_pre is not None, dh_post is not None, dh_res is not None,
        MP, power_of_2(MP - M), dm.shape[0], INTERPRET, BLOCK_T, num_warps=1, **ONE_SUM_FOR_ALL_LANES,
    )  # fmt: skip
    return out
