"""The dense strategy: matrix products with all experts, for tokens with so many experts that gathering costs more.

The dots compute h w_in^T and pick the chosen entries. The weighted sum multiplies w_out by a matrix that is 0 except at
the chosen entries. A tile of TOKENS times EXPERTS takes 128 MiB. Values of an expert that a list names twice are added
before the store, so there are no atomics. bfloat16 tables are multiplied by the values in two parts, accurate to 2^-16,
and summed in float32.

A token's result has the same bits in every batch: each number sums one row times one column in ascending blocks of
BLOCK_K, and the running sum passes from one chunk of experts to the next. torch.mm does not promise that: it may use
another kernel for another number of rows, and split the sum differently for different tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .sorting_networks import INTERPRET

TOKENS, EXPERTS = 4096, 8192  # per tile; EXPERTS is a multiple of BLOCK_K
# (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), by dtype alone, because another block would add in another order
WIDE_BLOCKS, NARROW_BLOCKS = (64, 64, 16, 4, 3), (128, 128, 64, 8, 3)


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    a_ptr, b_ptr, out_ptr, stride_bk, stride_bn, M, N, K,
    PARTS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (out, with ADD) + a [M, PARTS, K], its parts added up, @ b [K, N]; k ascending."""
    ALIKE: tl.constexpr = a_ptr.dtype.element_ty == b_ptr.dtype.element_ty
    AS_THEY_ARE: tl.constexpr = ALIKE and not INTERPRET  # numpy has no bfloat16
    rows = tl.cdiv(M, BLOCK_M)  # neighbouring programs share a tile of b, and all of a stays in L2
    m = tl.program_id(0) % rows * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    of_m, of_n = (m < M)[:, None], (n < N)[None, :]
    a_at = a_ptr + (m.to(tl.int64) * (PARTS * K))[:, None]
    b_at = b_ptr + (n.to(tl.int64) * stride_bn)[None, :]
    out_at = out_ptr + (m.to(tl.int64) * N)[:, None] + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ADD:
        total = tl.load(out_at, mask=of_m & of_n, other=0.0)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        b = tl.load(b_at + (k.to(tl.int64) * stride_bk)[:, None], mask=(k < K)[:, None] & of_n, other=0.0)
        for part in tl.static_range(PARTS):
            a = tl.load(a_at + part * K + k[None, :], mask=of_m & (k < K)[None, :], other=0.0)
            if AS_THEY_ARE:
                total = tl.dot(a, b, total, input_precision=PRECISION)
            else:
                total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    tl.store(out_at, total, mask=of_m & of_n)


@triton.jit
def pick_kernel(all_ptr, indices_ptr, dots_ptr, first, count, K, BLOCK_K: tl.constexpr):
    """dots[t, j] = all[t, e_tj - first] for experts in the chunk."""
    t = tl.program_id(0).to(tl.int64)
    for start in range(0, K, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        e = tl.load(indices_ptr + t * K + j, mask=j < K, other=-1).to(tl.int64) - first
        inside = (e >= 0) & (e < count) & (j < K)
        tl.store(dots_ptr + t * K + j, tl.load(all_ptr + t * count + e, mask=inside, other=0.0), mask=inside)


@triton.jit
def place_kernel(
    values_ptr, sorted_ptr, order_ptr, parts_ptr, first, count, K, PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """parts[t, :, e - first] = the sum of expert e's values in list t, in order, for experts in the chunk."""
    t = tl.program_id(0).to(tl.int64)
    for start in range(0, K, BLOCK_K):
        p = start + tl.arange(0, BLOCK_K)
        e = tl.load(sorted_ptr + t * K + p, mask=p < K, other=-1).to(tl.int64)
        before = tl.load(sorted_ptr + t * K + p - 1, mask=(p < K) & (p > 0), other=-1).to(tl.int64)
        leads = (e >= first) & (e < first + count) & (p < K) & (e != before)
        total = tl.zeros((BLOCK_K,), tl.float32)
        same = leads
        step = 0
        while tl.sum(same.to(tl.int32), axis=0) > 0:
            place = tl.load(order_ptr + t * K + p + step, mask=same, other=0)
            total += tl.load(values_ptr + t * K + place, mask=same, other=0.0)
            step += 1
            follows = tl.load(sorted_ptr + t * K + p + step, mask=same & (p + step < K), other=-1).to(tl.int64)
            same = same & (p + step < K) & (follows == e)
        for part in tl.static_range(PARTS):
            rounded = total.to(parts_ptr.dtype.element_ty)
            tl.store(parts_ptr + (t * PARTS + part) * count + (e - first), rounded, mask=leads)
            total -= rounded.to(tl.float32)


def product(a: Tensor, b: Tensor, out: Tensor, parts: int = 1, *, add: bool = False) -> None:
    """out [M, N] in float32 = (out, with add) + a [M, parts, K], its parts added up, @ b [K, N]."""
    (M, N), K = out.shape, b.shape[0]
    narrow = a.dtype == b.dtype != torch.float32
    allowed = b.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    block_m, block_n, block_k, warps, stages = NARROW_BLOCKS if narrow else WIDE_BLOCKS
    run(
        product_kernel, (cdiv(M, block_m) * cdiv(N, block_n),),
        a, b, out, b.stride(0), b.stride(1), M, N, K, parts, add, "tf32" if allowed else "ieee",
        block_m, block_n, block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def tiles(size: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, size)) for first in range(0, size, step))


def memory(tokens: int, table: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer that the tiles of tokens and experts share."""
    size = min(tokens, TOKENS) * min(table.shape[0], EXPERTS) * 4 // dtype.itemsize
    return torch.empty(size, dtype=dtype, device=table.device)


def dense_dots(rows: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """<rows[t], table[e_tj]> as [1, T, K] in float32; 0 for skipped pairs."""
    T, K = indices.shape
    chosen_dots = torch.zeros((1, T, K), dtype=torch.float32, device=rows.device)
    space = memory(T, table, torch.float32)
    for tokens in tiles(T if K else 0, TOKENS):
        for experts in tiles(table.shape[0], EXPERTS):
            t, n = tokens.stop - tokens.start, experts.stop - experts.start
            dots = space[: t * n].view(t, n)
            product(rows[tokens], table[experts].T, dots)
            at = indices[tokens], chosen_dots[0, tokens], experts.start, n, K
            run(pick_kernel, (t,), dots, *at, min(256, power_of_2(K)), num_warps=1)
    return chosen_dots


def dense_sums(values: Tensor, table: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, E]: sum_j values[t, j] table[e_tj]; NaN for a token with an index out of range."""
    (T, K), (N, E) = indices.shape, table.shape
    out = torch.empty((T, E), dtype=dtype, device=table.device)
    # values of finite results may exceed fp16's largest number, 65504, so with fp16 tables they stay float32
    parts, kind = (2, torch.bfloat16) if table.dtype == torch.bfloat16 else (1, torch.float32)
    space = memory(T, table, kind)
    for tokens in tiles(T, TOKENS):
        lists, t = indices[tokens], tokens.stop - tokens.start
        expert, order = lists.masked_fill((lists < 0) | (lists >= N), N).sort(dim=-1, stable=True)
        total = torch.zeros((t, E), dtype=torch.float32, device=table.device)
        for experts in tiles(N if K else 0, EXPERTS):
            n = experts.stop - experts.start
            matrix = space[: t * parts * n].zero_()
            at = expert, order, matrix, experts.start, n, K
            run(place_kernel, (t,), values[tokens], *at, parts, min(256, power_of_2(K)), num_warps=1)
            product(matrix, table[experts], total, parts, add=True)
        lost = ((lists < -1) | (lists >= N)).any(-1, keepdim=True)
        out[tokens] = total.masked_fill_(lost, float("nan"))
    return out
