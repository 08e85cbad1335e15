"""The gradients of both tables, by expert: the sum of value[t, j] row[t] over an expert's pairs (t, j), ascending.

Pairs are sorted by expert, stably. Most lists are short, and of a million experts most have no pair. A program
therefore handles a few neighbouring experts and reads rows of a few pairs of each at a time, to overlap the loads. A
list of more than SHORT pairs has its own program. Blocks of WHOLE pairs inside one list (half of all pairs may belong
to one expert) are summed beforehand, at fixed positions of the sorted order; COLUMNS at a time if tokens have many
experts.
Bytes: both tables' gradients once; the rows of h and dy come from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run

SHORT = 64  # pairs in the longest list that shares a program
WHOLE = 256  # pairs in a block that is summed beforehand
COLUMNS = 1024  # width of the blocks, if full width would take more than one float32 row per token
LONG_STEP = 8  # pairs of a long list whose rows are read together
BLOCK = 1024

Job = tuple[Tensor, Tensor, torch.dtype]  # values, rows, the gradient's dtype


@triton.jit(do_not_specialize=["P", "N"])
def keys_kernel(indices_ptr, key_ptr, P, N, BLOCK: tl.constexpr):
    """key[p] = the expert of pair p; N if it is skipped or out of range."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(indices_ptr + p, mask=p < P, other=-1)
    tl.store(key_ptr + p, tl.where((e >= 0) & (e < N), e, N), mask=p < P)


@triton.jit(do_not_specialize=["P", "N"])
def starts_kernel(sorted_ptr, starts_ptr, P, N, BLOCK: tl.constexpr):
    """starts[e] = the number of sorted pairs with an expert below e, for e = 0 to N."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + P
    left = P
    while left > 0:
        middle = (low + high) // 2
        before = tl.load(sorted_ptr + middle, mask=(low < high) & (e <= N), other=N) < e
        high = tl.where((low < high) & (before == 0), middle, high)
        low = tl.where((low < high) & before, middle + 1, low)
        left = left // 2
    tl.store(starts_ptr + e, low, mask=e <= N)


@triton.jit(do_not_specialize=["P", "K"])
def tokens_kernel(order_ptr, token_ptr, P, K, BLOCK: tl.constexpr):
    """token[p] = order[p] // K, computed once: a 64-bit division costs more than all work on a pair's row."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(token_ptr + p, tl.load(order_ptr + p, mask=p < P, other=0) // K, mask=p < P)


@triton.jit(do_not_specialize=["P", "N"])
def firsts_kernel(sorted_ptr, first_ptr, P, N, BLOCK: tl.constexpr):
    """first[p] = 1 if sorted pair p is its expert's first."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(sorted_ptr + p, mask=p < P, other=N)
    before = tl.load(sorted_ptr + p - 1, mask=(p > 0) & (p < P), other=-1)
    tl.store(first_ptr + p, ((e < N) & (e != before)).to(tl.int32), mask=p < P)


@triton.jit(do_not_specialize=["P", "N", "K"])
def used_kernel(
    sorted_ptr, upto_ptr, order_ptr, experts_ptr, starts_ptr, token_ptr, P, N, K, BLOCK: tl.constexpr
):  # fmt: skip
    """The used experts, ascending; the starts of their pairs, with the end of the last; the pairs' tokens."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(sorted_ptr + p, mask=p < P, other=N)
    before = tl.load(sorted_ptr + p - 1, mask=(p > 0) & (p < P), other=-1)
    after = tl.load(sorted_ptr + p + 1, mask=p + 1 < P, other=N)
    rank = tl.load(upto_ptr + p, mask=p < P, other=1).to(tl.int64)
    tl.store(experts_ptr + rank - 1, e.to(tl.int64), mask=(e < N) & (e != before))
    tl.store(starts_ptr + rank - 1, p, mask=(e < N) & (e != before))
    tl.store(starts_ptr + rank, p + 1, mask=(e < N) & (after >= N))
    tl.store(token_ptr + p, tl.load(order_ptr + p, mask=p < P, other=0) // K, mask=p < P)


@triton.jit
def add_pairs(total, first, last, order_ptr, token_ptr, value_ptr, rows_ptr, d, D, STEP: tl.constexpr):
    """total [G, BLOCK_D] plus the sums over the sorted pairs first [G] to last [G]."""
    for start in range(0, tl.max(last - first, axis=0), STEP):
        p = (first + start)[:, None] + tl.arange(0, STEP)[None, :]
        inside = p < last[:, None]
        value = tl.load(value_ptr + tl.load(order_ptr + p, mask=inside, other=0), mask=inside, other=0.0)
        token = tl.load(token_ptr + p, mask=inside, other=0).to(tl.int64)
        at = rows_ptr + (token * D)[:, :, None] + d[None, None, :]
        tile = tl.load(at, mask=inside[:, :, None] & (d < D)[None, None, :], other=0.0).to(tl.float32)
        total += tl.sum(tile * value[:, :, None], axis=1)
    return total


@triton.jit(do_not_specialize=["N"])
def blocks_kernel(
    order_ptr, sorted_ptr, token_ptr, value_ptr, rows_ptr, value_2_ptr, rows_2_ptr, block_ptr, N, D, FIRST, WIDTH,
    WHOLE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """block[c] = columns FIRST to FIRST + WIDTH of the sum of the c-th WHOLE pairs, if all have the same expert.

    The blocks of a second table follow.
    """
    c, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.program_id(2) == 1:
        value_ptr, rows_ptr, block_ptr = value_2_ptr, rows_2_ptr, block_ptr + tl.num_programs(0).to(tl.int64) * WIDTH
    e = tl.load(sorted_ptr + c * WHOLE)
    if (e < N) & (e == tl.load(sorted_ptr + c * WHOLE + WHOLE - 1)):
        column = s * BLOCK_D + tl.arange(0, BLOCK_D)
        d = FIRST + column
        first = tl.full((1,), 0, tl.int64) + c * WHOLE
        total = tl.zeros((1, BLOCK_D), tl.float32)
        total = add_pairs(total, first, first + WHOLE, order_ptr, token_ptr, value_ptr, rows_ptr, d, D, STEP)
        tl.store(block_ptr + c * WIDTH + column[None, :], total, mask=(column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["COUNT"])
def short_kernel(
    order_ptr, token_ptr, starts_ptr, value_ptr, rows_ptr, out_ptr, value_2_ptr, rows_2_ptr, out_2_ptr, COUNT, D,
    SHORT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient rows of GROUP experts, except those with more than SHORT pairs."""
    if tl.program_id(2) == 1:
        value_ptr, rows_ptr, out_ptr = value_2_ptr, rows_2_ptr, out_2_ptr
    r = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = r < COUNT
    first = tl.load(starts_ptr + r, mask=inside, other=0)
    last = tl.load(starts_ptr + r + 1, mask=inside, other=0)
    inside &= last - first <= SHORT
    total = tl.zeros((GROUP, BLOCK_D), tl.float32)
    last = tl.where(inside, last, first)
    total = add_pairs(total, first, last, order_ptr, token_ptr, value_ptr, rows_ptr, d, D, STEP)
    tl.store(out_ptr + (r * D)[:, None] + d[None, :], total, mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def place_of(e, experts_ptr, COUNT):
    """The position of e among the ascending experts, which contain it."""
    low = e * 0
    high = low + COUNT - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(experts_ptr + middle) < e:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["BLOCKS", "COUNT", "N"])
def long_kernel(
    order_ptr, sorted_ptr, token_ptr, starts_ptr, experts_ptr, value_ptr, rows_ptr, out_ptr,
    value_2_ptr, rows_2_ptr, out_2_ptr, block_ptr, BLOCKS, COUNT, N, D, FIRST, WIDTH,
    SPARSE: tl.constexpr, SHORT: tl.constexpr, WHOLE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient row of an expert with more than SHORT pairs, by the first program whose position is in its list."""
    if tl.program_id(2) == 1:
        value_ptr, rows_ptr, out_ptr = value_2_ptr, rows_2_ptr, out_2_ptr
        block_ptr += (tl.program_id(2) * BLOCKS).to(tl.int64) * WIDTH
    place = tl.program_id(0).to(tl.int64) * SHORT
    e = tl.load(sorted_ptr + place).to(tl.int64)
    if e < N:
        r = place_of(e, experts_ptr, COUNT) if SPARSE else e
        first, last = tl.load(starts_ptr + r), tl.load(starts_ptr + r + 1)
        if (last - first > SHORT) & (first > place - SHORT):
            column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
            d = FIRST + column
            one = tl.full((1,), 0, tl.int64)
            from_block, to_block = (first + WHOLE - 1) // WHOLE, last // WHOLE
            head = tl.where(to_block > from_block, from_block * WHOLE, last)
            tail = tl.where(to_block > from_block, to_block * WHOLE, last)
            total = tl.zeros((1, BLOCK_D), tl.float32)
            total = add_pairs(total, one + first, one + head, order_ptr, token_ptr, value_ptr, rows_ptr, d, D, STEP)
            for start in range(from_block, to_block, STEP):
                c = start + tl.arange(0, STEP)
                mask = (c < to_block)[:, None] & (column < WIDTH)[None, :]
                rows = tl.load(block_ptr + c[:, None].to(tl.int64) * WIDTH + column[None, :], mask=mask, other=0.0)
                total += tl.sum(rows, axis=0)[None, :]
            total = add_pairs(total, one + tail, one + last, order_ptr, token_ptr, value_ptr, rows_ptr, d, D, STEP)
            tl.store(out_ptr + r * D + d[None, :], total, mask=(column < WIDTH)[None, :])


class ByExpert:
    """The pairs sorted by expert; skipped pairs count as expert N and come last.

    sparse: index only the used experts. Their number is copied to the host asynchronously, so that further launches run
    before the host waits for it in `used`.
    """

    def __init__(self, indices: Tensor, n: int, *, sparse: bool = False) -> None:
        pairs, tokens, chosen = indices.numel(), indices.shape[:-1].numel(), max(1, indices.shape[-1])
        new = lambda size, narrow: torch.empty(  # noqa: E731
            size, dtype=torch.int32 if narrow else torch.int64, device=indices.device
        )
        key = new(pairs, n < 2**31)
        run(keys_kernel, (cdiv(pairs, BLOCK),), indices, key, pairs, n, BLOCK)
        self.expert, self.order = key.sort(stable=True)
        self.token, self.starts = new(pairs, tokens < 2**31), new((min(n, pairs) if sparse else n) + 1, pairs < 2**31)
        self.experts, self.count = None, None
        if sparse:
            self.experts, upto = new(min(n, pairs), False), new(pairs, pairs < 2**31)
            run(firsts_kernel, (cdiv(pairs, BLOCK),), self.expert, upto, pairs, n, BLOCK)
            upto.cumsum_(0, dtype=upto.dtype)
            self.count = PendingCount(upto[-1:])
            run(
                used_kernel, (cdiv(pairs, BLOCK),),
                self.expert, upto, self.order, self.experts, self.starts, self.token, pairs, n, chosen, BLOCK,
            )  # fmt: skip
        else:
            run(starts_kernel, (cdiv(n + 1, BLOCK),), self.expert, self.starts, pairs, n, BLOCK)
            run(tokens_kernel, (cdiv(pairs, BLOCK),), self.order, self.token, pairs, chosen, BLOCK)
        self.n, self.chosen = n, chosen
        # programs with many short lists, or with few longer ones; by sizes alone, so that results do not change
        self.group, self.step = (2, 1) if pairs < 8 * n else (1, 4)

    def used(self) -> Tensor:
        """The used experts, ascending; waits for the device."""
        return self.experts[: self.count.value()]

    def sums(self, jobs: list[Job]) -> Sums:
        """The gradients of at most two tables; starts the work that does not depend on the number of experts."""
        alike = len({(rows.shape[1], rows.dtype, dtype) for _, rows, dtype in jobs}) == 1
        return Sums(self, [jobs] if alike else [[job] for job in jobs])


class Sums:
    """The gradients of tables: each row is the sum of values[p] rows[p // K] over an expert's pairs p.

    Tables of the same shape and dtype share launches.
    """

    def __init__(self, pairs: ByExpert, groups: list[list[Job]]) -> None:
        self.pairs, self.groups, self.blocks = pairs, groups, []
        count = pairs.order.numel() // WHOLE
        for jobs in groups:
            D = jobs[0][1].shape[1]
            columns = D if 2 * pairs.chosen <= WHOLE else min(D, COLUMNS)
            blocks = torch.empty((len(jobs), count, columns), dtype=torch.float32, device=pairs.order.device)
            self.blocks.append(blocks)
            self._sum_blocks(jobs, blocks, 0, columns)

    def _sum_blocks(self, jobs: list[Job], blocks: Tensor, first: int, width: int) -> None:
        pairs, (value, rows, _), (value_2, rows_2, _) = self.pairs, jobs[0], jobs[-1]
        block_d, slabs = _slabs(width)
        run(
            blocks_kernel, (blocks.shape[1], slabs, len(jobs)),
            pairs.order, pairs.expert, pairs.token, value, rows, value_2, rows_2, blocks, pairs.n, rows.shape[1],
            first, width, WHOLE, LONG_STEP, block_d, num_warps=2, rows=rows.shape[1] | width,
        )  # fmt: skip

    def tables(self, experts: Tensor | None = None) -> list[Tensor]:
        """The gradients, each [N, D], or [len(experts), D] for the given experts."""
        pairs, gradients = self.pairs, []
        count, sparse = pairs.n if experts is None else experts.numel(), experts is not None
        at, P = pairs.starts if experts is None else experts, pairs.order.numel()
        for jobs, blocks in zip(self.groups, self.blocks, strict=True):
            D, columns = jobs[0][1].shape[1], blocks.shape[2]
            outs = [torch.empty((count, D), dtype=dtype, device=rows.device) for _, rows, dtype in jobs]
            each = (*jobs[0][:2], outs[0], *jobs[-1][:2], outs[-1])
            block_d, slabs = _slabs(D)
            run(
                short_kernel, (cdiv(count, pairs.group), slabs, len(jobs)),
                pairs.order, pairs.token, pairs.starts, *each, count, D,
                SHORT, pairs.group, pairs.step, block_d, num_warps=2, rows=D,
            )  # fmt: skip
            for first in range(0, D, columns):
                width = min(columns, D - first)
                if first:
                    self._sum_blocks(jobs, blocks, first, width)
                block_d, slabs = _slabs(width)
                run(
                    long_kernel, (cdiv(P, SHORT) if P > SHORT else 0, slabs, len(jobs)),
                    pairs.order, pairs.expert, pairs.token, pairs.starts, at, *each, blocks, blocks.shape[1], count,
                    pairs.n, D, first, width, sparse, SHORT, WHOLE, LONG_STEP, block_d, num_warps=2,
                    rows=D | width,
                )  # fmt: skip
            gradients += outs
        return gradients


def _slabs(D: int) -> tuple[int, int]:
    """(columns per program, programs)."""
    block_d = min(512, power_of_2(D, 16))
    return block_d, cdiv(D, block_d)


class PendingCount:
    """A number being copied from the device to the host; an empty tensor counts as 0."""

    def __init__(self, number: Tensor) -> None:
        self.number, self.arrived = number, None
        if number.is_cuda and number.numel():
            self.number = torch.empty(1, dtype=number.dtype, pin_memory=True)
            self.number.copy_(number, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(number.device))

    def value(self) -> int:
        if self.arrived is not None:
            self.arrived.synchronize()
        return int(self.number.sum())
