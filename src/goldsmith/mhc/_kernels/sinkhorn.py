"""Sinkhorn in registers: forward as n * n tensors of one number per token, backward as a [BLOCK_T, NP, NP] tile.

In the tile, padding is masked to 0, not to eps. The forward saves nothing. The backward runs the forward again and
stores only the denominators, n floats per half-step, in a scratch buffer. From them y_in = y * d rebuilds every state
in reverse (float32 gradients are off by at most 4e-6 for logits of standard deviation 1 to 6).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .projection import halvings


@triton.constexpr_function
def padded(count):
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@triton.jit
def columns(tile, COUNT: tl.constexpr):
    """The columns of a [BLOCK_T, COUNT] tile as a tuple, in order; COUNT is a power of two.

    One load and its columns compile eight times as fast as 64 loads, and read memory in order.
    """
    parts = (tile,)
    for level in tl.static_range(halvings(COUNT)):
        even = ()
        odd = ()
        for i in tl.static_range(len(parts)):
            a, b = tl.split(tl.reshape(parts[i], (parts[i].shape[0], COUNT // (2 << level), 2)))
            even = even + (a,)
            odd = odd + (b,)
        parts = even + odd
    flat = ()
    for i in tl.static_range(COUNT):
        flat = flat + (tl.reshape(parts[i], (parts[i].shape[0],)),)
    return flat


@triton.jit
def joined(values, COUNT: tl.constexpr):
    """The tile [BLOCK_T, COUNT] of a tuple of columns; those that are missing repeat the first."""
    parts = ()
    for i in tl.static_range(COUNT):
        parts = parts + (tl.expand_dims(values[i if i < len(values) else 0], 1),)
    for level in tl.static_range(halvings(COUNT)):
        pairs = ()
        for i in tl.static_range(len(parts) // 2):
            pair = tl.join(parts[i], parts[i + len(parts) // 2])
            pairs = pairs + (tl.reshape(pair, (pair.shape[0], 2 << level)),)
        parts = pairs
    return parts[0]


@triton.jit
def grid(N: tl.constexpr, NP: tl.constexpr):
    """Row index j [1, NP, 1], column index k [1, 1, NP], and the mask of existing elements [1, NP, NP]."""
    i = tl.arange(0, NP)
    j = i[None, :, None]
    k = i[None, None, :]
    return j, k, (j < N) & (k < N)


@triton.jit
def softmax_rows(logits, inside):
    """softmax over the last index; 0 in the padding."""
    top = tl.max(tl.where(inside, logits, float("-inf")), axis=2, keep_dims=True)
    e = tl.where(inside, exp(logits - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    total = tl.sum(e, axis=2, keep_dims=True)
    return tl.where(inside, tl.math.div_rn(e, tl.where(total == 0.0, 1.0, total)), 0.0)


@triton.jit
def half_step(p, eps, AXIS: tl.constexpr):
    """p / (sum over AXIS + eps), and the denominator. Padded elements of p are 0 and stay 0."""
    d = tl.sum(p, axis=AXIS, keep_dims=True) + eps
    d = tl.where(d == 0.0, 1.0, d)
    return tl.math.div_rn(p, tl.broadcast_to(d, p.shape)), d


@triton.jit
def reciprocal(d):
    """1 / d to within half a unit in the last place; a sum below the normal numbers counts as the smallest of them."""
    d = tl.where(d < 1.1754943508222875e-38, 1.1754943508222875e-38, d)
    r = 1.0 / d
    return tl.fma(r, tl.fma(-d, r, 1.0), r)


@triton.jit
def normalised(p, eps, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Every row, or with COLUMNS every column, divided by its sum + eps."""
    scales = ()
    for i in tl.static_range(N):
        d = p[i if COLUMNS else i * N]
        for j in tl.static_range(1, N):
            d = d + p[j * N + i if COLUMNS else i * N + j]
        scales = scales + (reciprocal(d + eps),)
    result = ()
    for i in tl.static_range(N * N):
        result = result + (p[i] * scales[i % N if COLUMNS else i // N],)
    return result


@triton.jit
def sinkhorn(logits, iterations, eps, N: tl.constexpr):
    """softmax + eps, then normalise columns, then (iterations - 1) times rows and columns.

    The matrices are tuples of N * N tensors, row by row, so that the order of every sum is written here and no thread
    waits for another.
    """
    p = ()
    for j in tl.static_range(N):
        top = logits[j * N]
        for k in tl.static_range(1, N):
            top = tl.maximum(top, logits[j * N + k])
        top = tl.where(top == float("-inf"), 0.0, top)
        row = ()
        for k in tl.static_range(N):
            row = row + (exp(logits[j * N + k] - top),)
        total = row[0]
        for k in tl.static_range(1, N):
            total = total + row[k]
        scale = reciprocal(total)
        for k in tl.static_range(N):
            p = p + (tl.fma(row[k], scale, eps),)
    p = normalised(p, eps, N, True)
    for _ in range(1, iterations):
        p = normalised(p, eps, N, False)
        p = normalised(p, eps, N, True)
    return p


@triton.jit
def sinkhorn_backward(
    g, logits, inside, j, k, scratch_ptr, stride_step, tokens, live, iterations, eps, N: tl.constexpr
):
    """dL of the unrolled steps, for g = dP.

    scratch [2 * iterations, T, N]: row steps index it by j, column steps by k.
    """
    by_column = scratch_ptr + tokens * N + k
    by_row = scratch_ptr + tokens * N + j
    column_mask = live & (k < N)
    row_mask = live & (j < N)
    s0 = softmax_rows(logits, inside)
    p = tl.where(inside, s0 + eps, 0.0)
    p, of_column = half_step(p, eps, 1)
    tl.store(by_column, of_column, mask=column_mask)
    for i in range(1, iterations):
        p, of_row = half_step(p, eps, 2)
        tl.store(by_row + (2 * i - 1) * stride_step, of_row, mask=row_mask)
        p, of_column = half_step(p, eps, 1)
        tl.store(by_column + (2 * i) * stride_step, of_column, mask=column_mask)
    tl.debug_barrier()  # lanes load denominators that other lanes stored
    # + 0 * j: the interpreter of Triton 3.9 does not accept a Python bool as a mask
    of_row = tl.load(by_row + (2 * iterations - 3) * stride_step, mask=row_mask & (iterations + 0 * j > 1), other=1.0)
    for back in range(1, iterations):
        i = iterations - back
        g, p = undo(g, p, of_column, inside, 1)
        # load two steps ahead of use, because a load takes longer than a step
        next_column = tl.load(by_column + (2 * i - 2) * stride_step, mask=column_mask, other=1.0)
        next_row = tl.load(by_row + (2 * i - 3) * stride_step, mask=row_mask & (i + 0 * j > 1), other=1.0)
        g, p = undo(g, p, of_row, inside, 2)
        of_column = next_column
        of_row = next_row
    g, p = undo(g, p, of_column, inside, 1)
    return s0 * (g - tl.sum(g * s0, axis=2, keep_dims=True))


@triton.jit
def undo(g, y, d, inside, AXIS: tl.constexpr):
    """One half-step y = p / d backwards: the gradient of p, and p itself."""
    inner = tl.sum(g * y, axis=AXIS, keep_dims=True)
    return tl.where(inside, tl.math.div_rn(g - inner, tl.broadcast_to(d, y.shape)), 0.0), y * d
