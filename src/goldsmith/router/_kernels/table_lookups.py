"""Table lookups by token: the dots of a row with its experts' rows, and the weighted sum of its experts' rows.

Both process the tables slab by slab, with all tokens before the next slab. A slab of 128 columns of 65,536 experts is
16 MB and stays in the L2 cache, so HBM is read once however often an expert is chosen. Each slab gives partial dots.
PARTS of them are kept; with more slabs the first are added up before the next ones start, in the same order.
Bytes: the rows of the chosen experts, 2 K D per token from L2, and the table once from HBM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .activations import activated, slope

SLAB = 128
PARTS = 8  # partial dots per pair that are kept at a time


@triton.jit
def chosen(indices_ptr, K, j, N):
    """(expert, whether it is valid, whether it is out of range) of entries j of a list; -1 is neither."""
    e = tl.load(indices_ptr + j, mask=j < K, other=-1).to(tl.int64)
    return e, (e >= 0) & (e < N), (e < -1) | (e >= N)


@triton.jit(do_not_specialize=["T", "N", "K", "FIRST"])
def dots_kernel(
    rows_ptr, table_ptr, indices_ptr, part_ptr, stride_e, stride_d, T, N, D, K, FIRST,
    DENSE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """part[s, t, j] = the partial dot of pair (t, j) in slab FIRST + s."""
    t, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = (FIRST + s) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(rows_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    columns = d.to(tl.int64) * (1 if DENSE else stride_d)
    for start in range(0, K, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        e, counts, _ = chosen(indices_ptr + t * K, K, j, N)
        mask = counts[:, None] & (d < D)[None, :]
        tile = tl.load(table_ptr + (e * stride_e)[:, None] + columns[None, :], mask=mask, other=0.0)
        dots = tl.sum(tile.to(tl.float32) * row[None, :], axis=1)
        tl.store(part_ptr + (s * T.to(tl.int64) + t) * K + j, tl.where(counts, dots, 0.0), mask=j < K)


@triton.jit(do_not_specialize=["N", "K"])
def sums_kernel(
    values_ptr, table_ptr, indices_ptr, out_ptr, stride_e, stride_d, N, E, K,
    DENSE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = s * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = d.to(tl.int64) * (1 if DENSE else stride_d)
    total = tl.zeros((BLOCK_D,), tl.float32)
    lost = 0
    for start in range(0, K, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        e, counts, wrong = chosen(indices_ptr + t * K, K, j, N)
        value = tl.load(values_ptr + t * K + j, mask=counts, other=0.0)
        mask = counts[:, None] & (d < E)[None, :]
        tile = tl.load(table_ptr + (e * stride_e)[:, None] + columns[None, :], mask=mask, other=0.0)
        total += tl.sum(tile.to(tl.float32) * value[:, None], axis=0)
        lost += tl.sum(wrong.to(tl.int32), axis=0)
    tl.store(out_ptr + t * E + d, tl.where(lost > 0, float("nan"), total), mask=d < E)


@triton.jit
def gather_slabs(part_ptr, p, P, mask, SLABS: tl.constexpr):
    total = tl.load(part_ptr + p, mask=mask, other=0.0)
    for s in range(1, SLABS):
        total += tl.load(part_ptr + s * P + p, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["P"])
def fold_kernel(part_ptr, P, SLABS: tl.constexpr, BLOCK: tl.constexpr):
    """part[0] = the sum of SLABS parts."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + p, gather_slabs(part_ptr, p, P.to(tl.int64), p < P, SLABS), mask=p < P)


@triton.jit(do_not_specialize=["P", "N"])
def gate_kernel(
    part_ptr, weights_ptr, indices_ptr, preact_ptr, gated_ptr, P, N,
    SLABS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Forward, by pair: gated = weights act(a), with a = the sum of SLABS parts; SLABS = 0: act(a) is 1."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, counts, _ = chosen(indices_ptr, P, p, N)
    gated = tl.load(weights_ptr + p, mask=counts, other=0.0).to(tl.float32)
    if SLABS > 0:
        a = gather_slabs(part_ptr, p, P.to(tl.int64), p < P, SLABS)
        tl.store(preact_ptr + p, a, mask=p < P)
        gated = gated * activated(a, ACTIVATION)
    tl.store(gated_ptr + p, tl.where(counts, gated, 0.0), mask=p < P)


@triton.jit(do_not_specialize=["P", "N"])
def gate_backward_kernel(
    part_ptr, preact_ptr, weights_ptr, indices_ptr, dweights_ptr, da_ptr, gated_ptr, P, N,
    SLABS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_IN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward, by pair: dweights = act(a) r, da = weights r act'(a), and gated; with SLABS = 0 only gated."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, counts, _ = chosen(indices_ptr, P, p, N)
    weights = tl.load(weights_ptr + p, mask=counts, other=0.0).to(tl.float32)
    hidden = tl.full((BLOCK,), 1.0, tl.float32)
    a = tl.zeros((BLOCK,), tl.float32)
    if HAS_IN:
        a = tl.load(preact_ptr + p, mask=counts, other=0.0)
        hidden = activated(a, ACTIVATION)
    tl.store(gated_ptr + p, tl.where(counts, weights * hidden, 0.0), mask=p < P)
    if SLABS > 0:
        r = gather_slabs(part_ptr, p, P.to(tl.int64), p < P, SLABS)
        tl.store(dweights_ptr + p, tl.where(counts, hidden * r, 0.0), mask=p < P)
        if HAS_IN:
            da = weights * r * slope(a, ACTIVATION)
            if ACTIVATION == "relu" or ACTIVATION == "relu2":
                da = tl.where(a <= 0.0, 0.0, da)  # a gate, not a factor: 0 also for an incoming NaN
            tl.store(da_ptr + p, tl.where(counts, da, 0.0), mask=p < P)


BLOCK = 1024


def dots(rows: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """Partial sums [at most PARTS, T, K] in float32 of <rows[t], table[e_tj]>; 0 where nothing is chosen."""
    T, D = rows.shape
    K, slab = indices.shape[1], min(SLAB, power_of_2(D, 16))
    slabs = cdiv(D, slab)
    part = torch.empty((min(slabs, PARTS), T, K), dtype=torch.float32, device=rows.device)
    computed = used = 0  # slabs computed so far, and the parts that hold their sum
    while computed < slabs:
        if computed:
            run(fold_kernel, (cdiv(T * K, BLOCK),), part, T * K, used, BLOCK)
            used = 1
        new = min(PARTS - used, slabs - computed)
        run(
            dots_kernel, (T, new if K else 0),
            rows, table, indices, part[used:], table.stride(0), table.stride(1), T, table.shape[0], D, K, computed,
            table.stride(1) == 1, min(32, power_of_2(K, 4)), slab, num_warps=2, rows=D | table.stride(0),
        )  # fmt: skip
        computed, used = computed + new, used + new
    return part[:used]


def sums(values: Tensor, table: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, E]: sum_j values[t, j] table[e_tj]; NaN for a token with an index out of range."""
    (T, K), E = indices.shape, table.shape[1]
    out, slab = torch.empty((T, E), dtype=dtype, device=values.device), min(SLAB, power_of_2(E, 16))
    run(
        sums_kernel, (T, cdiv(E, slab)),
        values, table, indices, out, table.stride(0), table.stride(1), table.shape[0], E, K,
        table.stride(1) == 1, min(32, power_of_2(K, 4)), slab, num_warps=2, rows=E | table.stride(0),
    )  # fmt: skip
    return out


def gate(part: Tensor | None, weights: Tensor, indices: Tensor, n: int, activation: str) -> tuple[Tensor, Tensor]:
    """(preact, gated), [T, K] in float32; preact is empty without `part`."""
    gated = torch.empty(indices.shape, dtype=torch.float32, device=indices.device)
    preact = torch.empty_like(gated) if part is not None else gated.new_empty(0)
    P, slabs = indices.numel(), 0 if part is None else part.shape[0]
    run(
        gate_kernel, (cdiv(P, BLOCK),),
        gated if part is None else part, weights, indices, preact, gated, P, n, slabs, activation, BLOCK,
    )  # fmt: skip
    return preact, gated


def gate_backward(
    part: Tensor | None, preact: Tensor | None, weights: Tensor, indices: Tensor, n: int, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(dweights in weights' dtype, da, gated in float32), each [T, K]; without `part` only gated is written."""
    new = lambda dtype: torch.empty(indices.shape, dtype=dtype, device=indices.device)  # noqa: E731
    dweights, da, gated = new(weights.dtype), new(torch.float32), new(torch.float32)
    P, slabs = indices.numel(), 0 if part is None else part.shape[0]
    run(
        gate_backward_kernel, (cdiv(P, BLOCK),),
        gated if part is None else part, gated if preact is None else preact, weights, indices, dweights, da, gated,
        P, n, slabs, activation, preact is not None, BLOCK,
    )  # fmt: skip
    return dweights, da, gated
