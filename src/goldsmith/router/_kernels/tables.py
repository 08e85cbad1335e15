"""By expert: the gradients of both tables, sum over an expert's pairs (t, j), ascending, of value[t, j] row[t].

Pairs are sorted by expert, stably. A program has one expert; blocks of 256 pairs that lie whole within one expert's
list (half of all pairs may be one expert's) are summed beforehand, at fixed places of the sorted order.
Bytes: both tables' gradients once; the rows of h and dy come from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run

WHOLE = 256  # pairs in a block that is summed beforehand
STEP = 8  # pairs whose rows are read together


@triton.jit
def added(total, value_ptr, rows_ptr, places, mask, d, K, D):
    """total + the sum of value[p] * row[p // K] over the places given."""
    value = tl.load(value_ptr + places, mask=mask, other=0.0)
    at = rows_ptr + (places // K)[:, None] * D + d[None, :]
    tile = tl.load(at, mask=mask[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    return total + tl.sum(tile * value[:, None], axis=0)


@triton.jit
def listed(total, first, last, order_ptr, value_ptr, rows_ptr, d, K, D, STEP: tl.constexpr):
    """total + the pairs first to last of the sorted order."""
    for start in range(first, last, STEP):
        p = start + tl.arange(0, STEP)
        places = tl.load(order_ptr + p, mask=p < last, other=0)
        total = added(total, value_ptr, rows_ptr, places, p < last, d, K, D)
    return total


@triton.jit
def blocks_kernel(
    order_ptr, sorted_ptr, value_ptr, rows_ptr, block_ptr, N, K, D,
    WHOLE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.load(sorted_ptr + c * WHOLE)
    if (e < N) & (e == tl.load(sorted_ptr + c * WHOLE + WHOLE - 1)):
        d = s * BLOCK_D + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_D,), tl.float32)
        total = listed(total, c * WHOLE, c * WHOLE + WHOLE, order_ptr, value_ptr, rows_ptr, d, K, D, STEP)
        tl.store(block_ptr + c * D + d, total, mask=d < D)


@triton.jit
def table_kernel(
    order_ptr, starts_ptr, experts_ptr, value_ptr, rows_ptr, block_ptr, out_ptr, K, D,
    SPARSE: tl.constexpr, WHOLE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.load(experts_ptr + r) if SPARSE else r
    first, last = tl.load(starts_ptr + e), tl.load(starts_ptr + e + 1)
    d = s * BLOCK_D + tl.arange(0, BLOCK_D)
    from_block, to_block = (first + WHOLE - 1) // WHOLE, last // WHOLE
    long = to_block > from_block
    head = tl.where(long, from_block * WHOLE, last)
    total = tl.zeros((BLOCK_D,), tl.float32)
    total = listed(total, first, head, order_ptr, value_ptr, rows_ptr, d, K, D, STEP)
    if long:
        for start in range(from_block, to_block, STEP):
            c = start + tl.arange(0, STEP)
            mask = (c < to_block)[:, None] & (d < D)[None, :]
            total += tl.sum(tl.load(block_ptr + c[:, None] * D + d[None, :], mask=mask, other=0.0), axis=0)
        total = listed(total, to_block * WHOLE, last, order_ptr, value_ptr, rows_ptr, d, K, D, STEP)
    tl.store(out_ptr + r * D + d, total, mask=d < D)


class ByExpert:
    """The pairs in the order of their experts; what is skipped counts as expert N, behind all others."""

    def __init__(self, indices: Tensor, n: int) -> None:
        flat = indices.reshape(-1)
        expert = torch.where((flat >= 0) & (flat < n), flat, n)
        self.expert, self.order = expert.sort(stable=True)
        self.starts = torch.searchsorted(self.expert, torch.arange(n + 1, device=flat.device, dtype=flat.dtype))
        self.n, self.k = n, indices.shape[-1]

    def used(self) -> Tensor:
        """Experts with a pair, ascending; waits for the device."""
        return (self.starts[1:] > self.starts[:-1]).nonzero().squeeze(-1)

    def table(self, values: Tensor, rows: Tensor, dtype: torch.dtype, experts: Tensor | None = None) -> Tensor:
        """[N, D] in dtype, or [len(experts), D]: each row the sum of values[p] rows[p // K] over its expert's pairs."""
        D, pairs = rows.shape[1], self.order.numel()
        block_d = min(512, power_of_2(D, 16))
        blocks = torch.empty((pairs // WHOLE, D), dtype=torch.float32, device=rows.device)
        run(
            blocks_kernel, (blocks.shape[0], cdiv(D, block_d)),
            self.order, self.expert, values, rows, blocks, self.n, self.k, D, WHOLE, STEP, block_d, num_warps=2,
        )  # fmt: skip
        count = self.n if experts is None else experts.numel()
        out = torch.empty((count, D), dtype=dtype, device=rows.device)
        run(
            table_kernel, (count, cdiv(D, block_d)),
            self.order, self.starts, self.starts if experts is None else experts, values, rows, blocks, out,
            max(1, self.k), D, experts is not None, WHOLE, STEP, block_d, num_warps=2,
        )  # fmt: skip
        return out
