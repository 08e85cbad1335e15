"""product_topk with one program per row, for lists too long for a lane's registers: sorts across the lanes.

The pairs of ranks that can be among the first K are given as a table of a * K + b.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .sort_keys import minus_infinity, nothing, ordered, value

PLACE_BITS = tl.constexpr(11)
LAST_PLACE = tl.constexpr((1 << 11) - 1)


@triton.jit
def axis(row, size, K: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr):
    """(values, positions, logsumexp) of an axis: its K largest logits in float32, with -inf for masked ones."""
    DTYPE: tl.constexpr = row.dtype.element_ty
    place = tl.arange(0, BLOCK)
    v = tl.load(row + place, mask=place < size, other=float("-inf"))
    order = tl.where(place < size, ordered(v), nothing(DTYPE))
    best = tl.topk((order.to(tl.int64) << PLACE_BITS) | (LAST_PLACE - place), K)
    order = (best >> PLACE_BITS).to(tl.int32)
    values = tl.where(order <= minus_infinity(DTYPE), float("-inf"), value(order, DTYPE))
    lse = 0.0
    if LSE:
        v = v.to(tl.float32)
        top = tl.max(v, axis=0)
        top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        below = tl.where(v > top, 0.0, v - top)  # with +inf in the row the other terms do not matter
        lse = top + tl.log(tl.sum(tl.where(v == float("inf"), v, exp(below)), axis=0))
    return values, LAST_PLACE - (best & LAST_PLACE).to(tl.int32), lse


@triton.jit
def select_row_kernel(
    x_ptr, y_ptr, pairs_ptr, scores_ptr, indices_ptr, lse_ptr, stride_x, stride_y, SX, SY, COUNT,
    K: tl.constexpr, K_P: tl.constexpr, PAIRS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    LSE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    x, x_places, lse_x = axis(x_ptr + t * stride_x, SX, K_P, BLOCK_X, LSE)
    y, y_places, lse_y = axis(y_ptr + t * stride_y, SY, K_P, BLOCK_Y, LSE)

    c = tl.arange(0, PAIRS)
    pairs = tl.load(pairs_ptr + c, mask=c < COUNT, other=K_P * K_P - 1)  # the last pair is a candidate only for K_P = 1
    a, b = tl.gather(x, pairs // K_P, 0), tl.gather(y, pairs % K_P, 0)
    s = tl.where((c >= COUNT) | (a == float("-inf")) | (b == float("-inf")), float("-inf"), a + b)
    best = tl.topk((ordered(s).to(tl.int64) << 32) | (K_P * K_P - 1 - pairs), K_P)

    order = (best >> 32).to(tl.int32)
    dead = order <= minus_infinity(tl.float32)
    pairs = K_P * K_P - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    ix, iy = tl.gather(x_places, pairs // K_P, 0), tl.gather(y_places, pairs % K_P, 0)
    s = tl.where(dead, float("-inf"), value(order, tl.float32))
    j = tl.arange(0, K_P)
    at = t * K + j
    tl.store(indices_ptr + at, tl.where(dead, -1, ix * SY + iy), mask=j < K)
    if LSE:
        tl.store(lse_ptr + 2 * t, lse_x)
        tl.store(lse_ptr + 2 * t + 1, lse_y)
        s = tl.where(dead, float("-inf"), s - (lse_x + lse_y))
    if WEIGHTS == "exp":
        s = tl.where(dead, 0.0, exp(tl.where(s > 128.0, 128.0, s)))  # exp of +inf would be NaN
    if WEIGHTS == "softmax":
        first = tl.sum(tl.where(j == 0, s, 0.0), axis=0)  # the largest, or NaN
        e = tl.where(dead | (j >= K), 0.0, exp(s - first))
        s = tl.where(dead, 0.0, tl.math.div_rn(e, tl.zeros_like(e) + tl.sum(e, axis=0)))
    tl.store(scores_ptr + at, s, mask=j < K)
