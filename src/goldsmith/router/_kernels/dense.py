"""By matrix products with all experts, where a token has so many of them that gathering rows costs more.

Of a product h w_in^T only the chosen dots are picked; the weighed sum multiplies w_out by a matrix that is 0 but at the
chosen places. Chunks of experts keep both below CHUNK_BYTES. An expert that a list names twice is added up before it is
stored: no atomics. 16-bit tables are multiplied by two parts of the values, to 2^-16 of them, and summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import power_of_2, run

CHUNK_BYTES = 128 * 2**20


@triton.jit
def pick_kernel(all_ptr, indices_ptr, dots_ptr, first, count, K, BLOCK_K: tl.constexpr):
    """dots[t, j] = all[t, e_tj - first], where that expert is one of the chunk's."""
    t = tl.program_id(0).to(tl.int64)
    for start in range(0, K, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        e = tl.load(indices_ptr + t * K + j, mask=j < K, other=-1).to(tl.int64) - first
        inside = (e >= 0) & (e < count) & (j < K)
        tl.store(dots_ptr + t * K + j, tl.load(all_ptr + t * count + e, mask=inside, other=0.0), mask=inside)


@triton.jit
def place_kernel(
    values_ptr, sorted_ptr, order_ptr, parts_ptr, plane, first, count, K,
    PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """parts[:, t, e - first] = the sum of the values of expert e in list t, ascending, over experts of the chunk."""
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
            tl.store(parts_ptr + part * plane + t * count + (e - first), rounded, mask=leads)
            total -= rounded.to(tl.float32)


def chunks(tokens: int, table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first expert, rows) of each chunk; of the shapes alone."""
    size = max(128, CHUNK_BYTES // (4 * max(1, tokens)) // 128 * 128)
    return ((first, table[first : first + size]) for first in range(0, table.shape[0], size))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, also of 16-bit matrices."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def dense_dots(rows: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """[1, T, K] in float32: <rows[t], table[e_tj]>; 0 where nothing is chosen."""
    T, K = indices.shape
    found = torch.zeros((1, T, K), dtype=torch.float32, device=rows.device)
    for first, block in chunks(T, table):
        run(
            pick_kernel, (T if K else 0,),
            product(rows, block.T), indices, found, first, block.shape[0], K, min(256, power_of_2(K)), num_warps=1,
        )  # fmt: skip
    return found


def dense_sums(values: Tensor, table: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, E]: sum_j values[t, j] table[e_tj]; NaN for a token with an index out of range."""
    (T, K), N = indices.shape, table.shape[0]
    expert, order = torch.where((indices >= 0) & (indices < N), indices, N).sort(dim=-1, stable=True)
    # fp16 holds no value above 65504, which the values of finite results may be
    parts = 2 if table.dtype == torch.bfloat16 else 1
    total = torch.zeros((T, table.shape[1]), dtype=torch.float32, device=table.device)
    for first, block in chunks(T, table):
        kind = torch.bfloat16 if parts == 2 else torch.float32
        matrix = torch.zeros((parts, T, block.shape[0]), dtype=kind, device=table.device)
        run(
            place_kernel, (T if K else 0,),
            values, expert, order, matrix, T * block.shape[0], first, block.shape[0], K, parts,
            min(256, power_of_2(K)), num_warps=1,
        )  # fmt: skip
        for part in reversed(matrix.unbind()):
            total += product(part, block.to(kind))
    lost = ((indices < -1) | (indices >= N)).any(-1, keepdim=True)
    return total.masked_fill_(lost, float("nan")).to(dtype)
