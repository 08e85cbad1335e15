"""The forward for few tokens in two launches: partial sums of many small chunks, then everything that needs them all.

Every sum has the order of the kernels for many tokens (`project`, `coefficients_forward`, `collapse`), so a token's
bits do not depend on the number of tokens. One program of the first kernel handles a chunk, CHUNK_D channels of all
streams: 64 programs at D = 4096 instead of 8. In the second kernel each token has one program for the coefficients and
some for the weighted sum over the streams; all of them add the chunks again, since that is quicker than a third launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.arithmetic import sigmoid
from ...core._kernels.launch import cdiv, power_of_2, run
from .coefficients import column, inverse_rms, new_coefficients
from .collapse import weighted_sum
from .float32_products import dot, int64_stride, settled, split, transposed
from .launch import CHUNK_D, INTERPRET, LANES, PARTS, SLICE_D
from .projection import load_phi, squares_by_lane
from .sinkhorn import sinkhorn
from .stream_gradient import load_columns, load_tiles, mixed

MOST_TOKENS = 4 if INTERPRET else 64  # the interpreter runs one program after the other
MOST_STREAMS = 4  # the first kernel holds all streams and weights: with 8 it compiles for half a minute and spills


def are_few(x: Tensor) -> bool:
    """Whether x [T, n, D] takes these kernels."""
    return 0 < x.shape[0] <= MOST_TOKENS and x.shape[1] <= MOST_STREAMS


@triton.jit(do_not_specialize=["T", "M"])
def _chunks_kernel(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, phi_ptr, gamma_ptr, y_ptr, part_ptr, stride_xt, stride_xn, stride_ft, T,
    M, D, N: tl.constexpr, MP: tl.constexpr, ROW: tl.constexpr, X_PARTS: tl.constexpr, LANES: tl.constexpr,
    HAS_GAMMA: tl.constexpr, MIX: tl.constexpr, TRANSPOSED: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Partial sums [T, chunks, ROW] of x, or with MIX of y = post(x, f, h_post, h_res), which it stores."""
    c = tl.program_id(0)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = c * BLOCK_D + tl.arange(0, BLOCK_D)
    live = (t < T)[:, None] & (d < D)[None, :]
    streams = load_tiles(x_ptr, t, stride_xt, int64_stride(stride_xn), d, live, N)
    weights = ()
    for k in tl.static_range(N):
        weights = weights + (load_phi(phi_ptr, gamma_ptr, k, d, M, D, N, MP, HAS_GAMMA),)
    if MIX:
        h_post = load_columns(h_post_ptr, t, T, N)
        h_res = load_columns(h_res_ptr, t, T, N * N)
        f = load_tiles(f_ptr, t, stride_ft, 0, d, live, 1)[0].to(tl.float32)
        after = ()
        for k in tl.static_range(N):
            y = tl.fma(h_post[k], f, mixed(streams, h_res, k, N, not TRANSPOSED)).to(x_ptr.dtype.element_ty)
            tl.store(y_ptr + t[:, None] * (N * D) + k * D + d[None, :], y, mask=live)
            after = after + (settled(y, INTERPRET),)
        streams = after
    acc = tl.zeros((BLOCK_T, MP), tl.float32)
    squares = tl.zeros((BLOCK_T, LANES), tl.float32)
    for k in tl.static_range(N):
        acc += dot(split(streams[k], X_PARTS, INTERPRET), transposed(split(weights[k], 3, INTERPRET)), INFINITE=True)
        squares += squares_by_lane(streams[k], LANES)
    m = tl.arange(0, MP)
    lane = tl.arange(0, LANES)
    row = part_ptr + (t * tl.num_programs(0) + c)[:, None] * ROW
    tl.store(row + m[None, :], acc, mask=(t < T)[:, None] & (m < M)[None, :])
    tl.store(row + (M + lane)[None, :], squares, mask=(t < T)[:, None])


@triton.jit
def sum_chunks(part_ptr, row, mask, CHUNKS, PER_SLICE: tl.constexpr, ROW: tl.constexpr):
    """The partial sums of a token: chunks added in order to slices, slices in order to the whole."""
    total = tl.zeros((ROW,), tl.float32)
    for first in range(0, CHUNKS, 2 * PER_SLICE):  # the loads of two slices are in flight together
        slices = ()
        for half in tl.static_range(2):
            c = first + half * PER_SLICE
            part = tl.load(part_ptr + c * ROW + row, mask=mask & (c < CHUNKS), other=0.0)
            for i in tl.static_range(1, PER_SLICE):
                part += tl.load(part_ptr + (c + i) * ROW + row, mask=mask & (c + i < CHUNKS), other=0.0)
            slices = slices + (part,)
        total = total + slices[0] + slices[1]
    return total


@triton.jit(do_not_specialize=["T", "iterations", "K", "CHUNKS", "store_pre", "store_logits"])
def _finish_kernel(
    part_ptr, x_ptr, alpha_ptr, bias_ptr, h_in_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, inv_rms_ptr, h_mix_ptr,
    logits_ptr, stride_xt, stride_xn, T, D,
    rms_eps, pre_eps, post_mult, post_eps, iterations, sinkhorn_eps, K, CHUNKS, store_pre, store_logits,
    N: tl.constexpr, PER_SLICE: tl.constexpr, LANES: tl.constexpr, ROW: tl.constexpr,
    GROUPS: tl.constexpr, SINKHORN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) - 1  # -1: the coefficients
    M: tl.constexpr = 2 * N + N * N if GROUPS == 3 else GROUPS * N
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (d < D) & (d >= 0)
    row = tl.arange(0, ROW)
    group = tl.minimum(row // N, GROUPS - 1)
    alpha = tl.load(alpha_ptr + group, mask=row < M, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + row, mask=row < M, other=0.0).to(tl.float32)
    x_ptr += t * stride_xt
    x = load_rows(x_ptr, stride_xn, d, inside, N)
    mix = sum_chunks(part_ptr + t * CHUNKS * ROW, row, row < M + LANES, CHUNKS, PER_SLICE, ROW)
    inv_rms = inverse_rms(mix, row, K, rms_eps, M, LANES)
    logit = tl.fma(alpha, mix * inv_rms, bias)
    s = sigmoid(logit)
    h_pre = s + pre_eps
    if block >= 0:
        weights = ()
        for i in tl.static_range(N):
            weights = weights + (column(h_pre, row, i),)
        tl.store(h_in_ptr + t * D + d, weighted_sum(x, weights, N), mask=inside)
    else:
        tl.store(inv_rms_ptr + t, inv_rms)
        tl.store(h_mix_ptr + t * M + row, mix, mask=row < M)
        tl.store(h_pre_ptr + t * N + row, h_pre, mask=(row < N) & (store_pre > 0))
        tl.store(logits_ptr + t * M + row, logit, mask=(row < M) & (store_logits > 0))
        if GROUPS > 1:
            tl.store(h_post_ptr + t * N + row - N, post_mult * s + post_eps, mask=(row >= N) & (row < 2 * N))
        if GROUPS > 2:
            if SINKHORN:
                result = ()
                for c in tl.static_range(N * N):
                    result = result + (column(logit, row, 2 * N + c),)
                result = sinkhorn(result, iterations, sinkhorn_eps, N)
                for c in tl.static_range(N * N):
                    tl.store(h_res_ptr + t * (N * N) + c, result[c])
            else:
                tl.store(h_res_ptr + t * (N * N) + row - 2 * N, logit, mask=(row >= 2 * N) & (row < M))


@triton.jit
def load_rows(x_ptr, stride_xn, d, inside, N: tl.constexpr):
    rows = ()
    for i in tl.static_range(N):
        rows = rows + (tl.load(x_ptr + i * int64_stride(stride_xn) + d, mask=inside, other=0.0),)
    return rows


def mixed_chunks(
    x: Tensor, phi: Tensor, gamma: Tensor | None, *, f: Tensor | None = None, h_post: Tensor | None = None,
    h_res: Tensor | None = None, orientation: str = "in_out",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [T, n, D] and partial sums [T, chunks, row]; y is x, or with f, h_post and h_res the streams after post."""
    T, N, D = x.shape
    M = phi.shape[0]
    mix = f is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if mix else x
    row, count = power_of_2(M + LANES, 16), cdiv(D, CHUNK_D)
    part = torch.empty((T, count, row), dtype=torch.float32, device=x.device)
    or_x = lambda v: x if v is None else v  # noqa: E731
    run(
        _chunks_kernel, (count, cdiv(T, 64)),
        x, or_x(f), or_x(h_post), or_x(h_res), phi, phi if gamma is None else gamma, y, part,
        x.stride(0), x.stride(1), f.stride(0) if mix else 0, T, M, D, N, power_of_2(M, 16), row, PARTS[x.dtype], LANES,
        gamma is not None, mix, orientation == "out_in", INTERPRET, 64, CHUNK_D,
        num_warps=8 if mix else CHUNK_WARPS, enable_fp_fusion=False,
        rows=D | x.stride(0) | x.stride(1) | (f.stride(0) if mix else 0),
    )  # fmt: skip
    return y, part


CHUNK_WARPS, FINISH_WARPS, FINISH_D = 4, 4, 1024


def finish(
    part: Tensor, x: Tensor, alpha: Tensor, bias: Tensor, *, rms_eps: float, pre_eps: float, post_mult: float = 1.0,
    post_eps: float = 0.0, iterations: int = 1, sinkhorn_eps: float = 0.0, sinkhorn: bool = True,
    output: str | None = "h_in", batch: Sequence[int] | None = None, logits: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """The coefficients by name and the weighted sum, `output`, from the partial sums of x [T, n, D].

    logits  the logits as well. Without them, h_pre is only among the results if there is no output
    batch   the leading dimensions of the results, with T tokens; default [T]
    """
    T, N, D = x.shape
    M, groups = bias.numel(), alpha.numel()
    batch = (T,) if batch is None else batch
    alone = logits or output is None
    out = new_coefficients(batch, N, M, groups, x.device, logits=logits, h_pre=alone)
    absent, h_in = out["h_mix"], x  # x is not written: without an output the grid has no program that does
    if output:
        out[output] = h_in = torch.empty((*batch, D), dtype=x.dtype, device=x.device)
    run(
        _finish_kernel, (T, 1 + (cdiv(D, FINISH_D) if output else 0)),
        part, x, alpha, bias, h_in, out.get("h_pre", absent), out.get("h_post", absent),
        out.get("h_res", absent), out["inv_rms"], out["h_mix"], out.get("logits", absent), x.stride(0), x.stride(1), T,
        D, rms_eps, pre_eps, post_mult, post_eps, iterations, sinkhorn_eps, N * D, part.shape[1], int(alone),
        int(logits), N, SLICE_D // CHUNK_D, LANES, part.shape[2], groups, sinkhorn, FINISH_D,
        num_warps=FINISH_WARPS, enable_fp_fusion=False, rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return out
