"""product_topk with a row in every lane: no shuffles, no memory between the logits and the answer.

Both axes keep a descending list of K keys while the logits pass in chunks. The pairs (a, b) of ranks that can be among
the first K at all, those with (a + 1)(b + 1) <= K, are then merged: hook h holds row h from column h on, and column h
below it, both descending as they stand.

Bytes a row: the logits once, 8 a selected pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .keys import minus_infinity, nothing, ordered, value
from .networks import descending, greatest, merged, padded


@triton.jit
def columns(tile):
    """The eight columns of [BLOCK, 8]; in registers nothing moves."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 4, 2)))
    return quarters(even) + quarters(odd)


@triton.jit
def quarters(tile):
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 2, 2)))
    a, b = tl.split(even)
    c, d = tl.split(odd)
    return (a, b, c, d)


@triton.jit
def table(a, LOG: tl.constexpr):
    """2^LOG tensors as the columns of [BLOCK, 2^LOG]: one store, where a store each takes the compiler minutes."""
    for level in tl.static_range(LOG):
        joined = ()
        for i in tl.static_range(1 << (LOG - 1 - level)):
            both = tl.join(a[i], a[i + (1 << (LOG - 1 - level))])
            joined = joined + (tl.reshape(both, (both.shape[0], 2 << level)),)
        a = joined
    return a[0]


@triton.jit
def load_keys(row, live, at, size, CHUNK: tl.constexpr, PLACE_BITS: tl.constexpr):
    """Keys of CHUNK logits of every row, descending, and the logits as they came."""
    WIDE: tl.constexpr = row.dtype.element_ty.primitive_bitwidth == 32
    keys = ()
    tiles = ()
    for i in tl.static_range(CHUNK // 8):
        place = at + i * 8 + tl.arange(0, 8)
        inside = live[:, None] & (place < size)[None, :]
        v = tl.load(row[:, None] + place[None, :], mask=inside, other=float("-inf"))
        order = tl.where(inside, ordered(v), nothing(v.dtype))
        behind = ((1 << PLACE_BITS) - 1 - place)[None, :]
        keys = keys + columns(((order.to(tl.int64) if WIDE else order) << PLACE_BITS) | behind)
        tiles = tiles + (v,)
    return descending(keys), tiles


@triton.jit
def add_exponentials(top, total, tiles):
    """Maximum and sum of exp(v - maximum) so far; a maximum that is not finite counts as 0."""
    new = top
    for i in tl.static_range(len(tiles)):
        new = tl.maximum(new, tl.max(tiles[i].to(tl.float32), axis=1))
    shift = tl.where(tl.abs(new) == float("inf"), 0.0, new)
    total = tl.where(tl.abs(top) == float("inf"), total, total * exp(top - shift))
    for i in tl.static_range(len(tiles)):
        v = tiles[i].to(tl.float32)
        total += tl.sum(tl.where(v == float("inf"), v, exp(v - shift[:, None])), axis=1)
    return new, total


@triton.jit
def axis(row, live, size, LOG: tl.constexpr, PLACE_BITS: tl.constexpr, LSE: tl.constexpr):
    """The 2^LOG greatest of an axis as (float32 values with -inf for nothing, places), and its logsumexp."""
    DTYPE: tl.constexpr = row.dtype.element_ty
    LOG_CHUNK: tl.constexpr = min(LOG, 5)
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    top = tl.full(live.shape, float("-inf"), tl.float32)
    total = tl.zeros(live.shape, tl.float32)
    least = tl.full(live.shape, nothing(DTYPE), tl.int64 if DTYPE.primitive_bitwidth == 32 else tl.int32) << PLACE_BITS
    best = padded((least,), 1 << LOG, least)
    for at in range(0, size, CHUNK):
        keys, tiles = load_keys(row, live, at, size, CHUNK, PLACE_BITS)
        best = greatest(best, keys)
        if LSE:
            top, total = add_exponentials(top, total, tiles)
    values = ()
    places = ()
    for i in tl.static_range(1 << LOG):
        order = (best[i] >> PLACE_BITS).to(tl.int32)
        values = values + (tl.where(order <= minus_infinity(DTYPE), float("-inf"), value(order, DTYPE)),)
        places = places + (((1 << PLACE_BITS) - 1 - (best[i] & ((1 << PLACE_BITS) - 1))).to(tl.int64),)
    return values, places, tl.where(tl.abs(top) == float("inf"), 0.0, top) + tl.log(total)


@triton.jit
def pair(x, y, x_place, y_place, RANK: tl.constexpr, LAST: tl.constexpr, PLACE_BITS: tl.constexpr):
    """The key of a pair: its sum, then its ranks (LAST - RANK), and with them the places."""
    s = tl.where((x == float("-inf")) | (y == float("-inf")), float("-inf"), x + y)
    ranks: tl.constexpr = (LAST - RANK) << (2 * PLACE_BITS)
    return (ordered(s).to(tl.int64) << 32) | (ranks | (x_place << PLACE_BITS) | y_place)


@triton.jit
def hook(x, y, x_places, y_places, H: tl.constexpr, LOG: tl.constexpr, PLACE_BITS: tl.constexpr):
    """All candidates (H, b >= H) and (a > H, H), descending."""
    K: tl.constexpr = 1 << LOG
    END: tl.constexpr = K // (H + 1)
    across = ()
    for b in tl.static_range(H, END):
        across = across + (pair(x[H], y[b], x_places[H], y_places[b], H * K + b, K * K - 1, PLACE_BITS),)
    down = ()
    for a in tl.static_range(H + 1, END):
        down = down + (pair(x[a], y[H], x_places[a], y_places[H], a * K + H, K * K - 1, PLACE_BITS),)
    return merged(across, down, K, tl.full(x[0].shape, -(1 << 63), tl.int64))


@triton.constexpr_function
def hooks(k):
    """How many h have (h + 1)^2 <= k."""
    return int(k**0.5 + 1e-9)


@triton.jit(do_not_specialize=["T"])
def select_kernel(
    x_ptr, y_ptr, scores_ptr, indices_ptr, lse_ptr, stride_x, stride_y, T, SX, SY,
    K: tl.constexpr, LOG: tl.constexpr, PLACE_BITS: tl.constexpr, LOG_SOFTMAX: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = t < T
    x, x_places, lse_x = axis(x_ptr + t * stride_x, live, SX, LOG, PLACE_BITS, LOG_SOFTMAX)
    y, y_places, lse_y = axis(y_ptr + t * stride_y, live, SY, LOG, PLACE_BITS, LOG_SOFTMAX)

    H: tl.constexpr = hooks(1 << LOG)
    best = hook(x, y, x_places, y_places, H - 1, LOG, PLACE_BITS)
    for h in tl.static_range(1, H):
        outer = hook(x, y, x_places, y_places, H - 1 - h, LOG, PLACE_BITS)
        best = merged(outer, best, 1 << LOG, tl.full(x[0].shape, -(1 << 63), tl.int64))

    if LOG_SOFTMAX:
        tl.store(lse_ptr + 2 * t[:, None] + tl.arange(0, 2)[None, :], tl.join(lse_x, lse_y), mask=live[:, None])
    sums = ()
    indices = ()
    for j in tl.static_range(1 << LOG):
        order = (best[j] >> 32).to(tl.int32)
        dead = order <= minus_infinity(tl.float32)
        ix = ((best[j] >> PLACE_BITS) & ((1 << PLACE_BITS) - 1)).to(tl.int32)
        iy = (best[j] & ((1 << PLACE_BITS) - 1)).to(tl.int32)
        indices = indices + (tl.where(dead, -1, ix * SY + iy),)
        sums = sums + (tl.where(dead, float("-inf"), value(order, tl.float32)),)
    j = tl.arange(0, 1 << LOG)
    at = t[:, None] * K + j[None, :]
    inside = live[:, None] & (j < K)[None, :]
    tl.store(indices_ptr + at, table(indices, LOG), mask=inside)
    tl.store(scores_ptr + at, table(scores(sums, lse_x + lse_y, K, LOG_SOFTMAX, WEIGHTS), LOG), mask=inside)


@triton.jit
def scores(sums, lse, K: tl.constexpr, LOG_SOFTMAX: tl.constexpr, WEIGHTS: tl.constexpr):
    """The first K sums as scores or weights; nothing selected is -inf, or the weight 0."""
    total = tl.zeros(lse.shape, tl.float32)
    if WEIGHTS == "softmax":
        for j in tl.static_range(K):
            total += tl.where(sums[j] == float("-inf"), 0.0, exp(sums[j] - sums[0]))
    out = ()
    for j in tl.static_range(len(sums)):
        dead = sums[j] == float("-inf")
        if WEIGHTS == "softmax":
            s = tl.where(dead, 0.0, tl.math.div_rn(exp(sums[j] - sums[0]), total))
        else:
            s = tl.where(dead, float("-inf"), sums[j] - lse) if LOG_SOFTMAX else sums[j]
            if WEIGHTS == "exp":
                s = tl.where(dead, 0.0, exp(tl.where(s > 128.0, 128.0, s)))  # of +inf it makes NaN
        out = out + (s,)
    return out
