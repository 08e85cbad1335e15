"""product_topk with one warp per row and k <= 64: limits discard most logits, so that little has to be sorted.

1. Each lane keeps its largest logit of an axis. The 18th of these 32 in sorted order (the 26th for k > 32) is a first
   guess of a limit. The logits not below it, about 25 per axis, are marked (packed_logits.py, float32_logits.py).
2. Marked logits are gathered, one per lane, and sorted (marked_logits.py). If there are more marks than slots (ties, or
   few lanes that hold all of the best), bisection by key reduces them to k or more per axis.
3. The pairs of ranks with (a + 1)(b + 1) <= K, 119 for 32 and 280 for 64, are sorted (lane_sorts.py). The k-th of them
   bounds the selection: a logit whose sum with the other axis's largest is below it cannot be selected. If the guess
   was above the limit that follows from this bound, in one row of ten, steps 1 to 3 run again with that limit.

Keys of 16-bit logits and of their pairs are float32 with the position or the pair's number in their last bits, provided
that these bits are 0 in all sums that matter. Otherwise, and for float32 logits, keys are 64-bit integers.
Bytes per row: the logits once, or twice for float32 (the second time from L1); 8 per selected pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .float32_logits import greatest, marked_wide, tile_of
from .lane_sorts import LANES, broadcast_first, broadcast_lane, float_of, order_of, select_pairs, sorted_pair
from .marked_logits import LAST_PLACE, bit_count, element_at, order_of_key, sorted_keys, split_keys
from .packed_logits import at_most, flip_order, greatest_of_lanes, low_half, marked, packed_limit, shares, words_of

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def marked_by_key(row, size, limit, WIDTH: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr):
    """Marks of the logits whose whole key is not below `limit`; `marked` and `marked_wide` compare values only."""
    NARROW: tl.constexpr = row.dtype.element_ty.primitive_bitwidth == 16
    mask = tl.zeros((LANES,), MASK)
    i = tl.arange(0, WIDTH)
    bit = tl.full((WIDTH,), 1, MASK) << ((i // 2 + i % 2 * 16) if NARROW else i).to(MASK)
    for at in range(0, size, LANES * WIDTH):
        v, place = tile_of(row, at, size, WIDTH, EVEN)
        below = (order_of_key(v, place, NARROW) < limit) | (place >= size)
        ahead = at // LANES
        if NARROW:
            ahead = (ahead // 2) % 16 + ahead // 32 * 32
        mask |= tl.sum(tl.where(below, 0, bit[None, :]), axis=1) << ahead
    return mask


@triton.jit
def limit_of(bound, other):
    """A limit below which no logit reaches `bound` in a sum with `other`, the largest logit of the other axis."""
    # the margin is four times the rounding error of the sum and the difference
    limit = (bound - other) - 2.0**-22 * (tl.abs(bound) + tl.abs(other))
    return a_number(limit)


@triton.jit
def a_number(limit):
    """limit, but at least the lowest finite number, also for NaN: -inf is never selected."""
    return tl.where(limit > LOWEST, limit, LOWEST)


@triton.jit
def reduced_marks(mask, row, size, limit, top, K, ROOM: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """(marks, their number), reduced to between K and ROOM if there are more than ROOM.

    No marked logit is below `limit`, and no logit is above `top`.
    """
    NARROW: tl.constexpr = row.dtype.element_ty.primitive_bitwidth == 16
    count = tl.sum(bit_count(mask), axis=0)
    if count > ROOM:
        least, most = float_of(tl.max(order_of(limit), axis=0)), float_of(tl.max(order_of(top), axis=0))
        low, high = order_of_key(least, LAST_PLACE, NARROW) & -2048, order_of_key(most, -1, NARROW)
        while (count > ROOM) | (count < K):
            middle = (low & high) + ((low ^ high) >> 1)
            mask = marked_by_key(row, size, middle, WIDTH, EVEN, mask.dtype)
            count = tl.sum(bit_count(mask), axis=0)
            low = tl.where(count > ROOM, middle, low)
            high = tl.where(count > ROOM, high, middle)
    return mask, count


@triton.jit
def finite(v):
    """v, with 0 in place of NaN and infinities."""
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def zero_lists(DTYPE: tl.constexpr, R: tl.constexpr):
    out = ()
    for _ in tl.static_range(R):
        out = out + (tl.zeros((LANES,), DTYPE),)
    return out


@triton.jit
def weighted_scores(sums, lse, K, LSE: tl.constexpr, WEIGHTS: tl.constexpr):
    """The scores or weights of the sorted sums, in tensors of 32."""
    lane = tl.arange(0, LANES)
    top = 0.0
    total = tl.zeros((LANES,), tl.float32)
    if WEIGHTS == "softmax":
        top = tl.sum(tl.where(lane == 0, sums[0], 0.0), axis=0)  # the largest, or NaN
        for i in tl.static_range(len(sums)):
            dead = (sums[i] == float("-inf")) | (i * LANES + lane >= K)
            total += tl.where(dead, 0.0, exp(sums[i] - top))
        total = tl.zeros((LANES,), tl.float32) + tl.sum(total, axis=0)
    out = ()
    for i in tl.static_range(len(sums)):
        s = sums[i]
        dead = s == float("-inf")
        if LSE:
            s = tl.where(dead, s, s - lse)
        if WEIGHTS == "exp":
            s = tl.where(dead, 0.0, exp(tl.where(s > 128.0, 128.0, s)))  # exp of +inf would be NaN
        if WEIGHTS == "softmax":
            s = tl.where(dead, 0.0, tl.math.div_rn(exp(s - top), total))
        out = out + (s,)
    return out


@triton.jit
def guess(both, RANK: tl.constexpr):
    """Limits of x and y as ordered 16-bit integers: the largest logits of RANK lanes are not below them."""
    limits = broadcast_lane(both, RANK)
    return (limits << 16) >> 16, limits >> 16


@triton.jit
def marks(
    row_x, row_y, xs, ys, SX, SY, limit_x, limit_y, top_x, top_y,
    WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr, EVEN_X: tl.constexpr, EVEN_Y: tl.constexpr, MASK: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """(marks of x, marks of y, their numbers x | y << 16, and for float32 each lane's two sums of exp(logit - top))."""
    DTYPE: tl.constexpr = row_x.dtype.element_ty
    total_x, total_y = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    if DTYPE.primitive_bitwidth == 16:
        mask_x, mask_y = marked(xs, limit_x, MASK, DTYPE), marked(ys, limit_y, MASK, DTYPE)
    else:
        mask_x, total_x = marked_wide(row_x, SX, limit_x, top_x, WIDTH_X, EVEN_X, MASK, LSE)
        mask_y, total_y = marked_wide(row_y, SY, limit_y, top_y, WIDTH_Y, EVEN_Y, MASK, LSE)
    return mask_x, mask_y, tl.sum(bit_count(mask_x) | (bit_count(mask_y) << 16), axis=0), total_x, total_y


@triton.jit
def limits_of(order, v, NARROW: tl.constexpr, DTYPE: tl.constexpr, OF_ORDER: tl.constexpr):
    """(the limit in the form that `marks` compares, as float32), from an ordered 16-bit integer or a float32 v."""
    if NARROW:
        limit = packed_limit(order if OF_ORDER else at_most(v, DTYPE), DTYPE)
        value = low_half(limit, DTYPE)
    else:
        value = a_number(float_of(order << 16)) if OF_ORDER else v
        limit = value
    return limit, value


@triton.jit(do_not_specialize=["K"])
def bounded_kernel(
    x_ptr, y_ptr, words_ptr, scores_ptr, indices_ptr, lse_ptr, stride_x, stride_y, SX, SY, K,
    ROOM: tl.constexpr, BITS: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr,
    TILES_X: tl.constexpr, TILES_Y: tl.constexpr, EVEN_X: tl.constexpr, EVEN_Y: tl.constexpr, MANY: tl.constexpr,
    LSE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NARROW: tl.constexpr = DTYPE.primitive_bitwidth == 16
    MASK: tl.constexpr = tl.int64 if MANY else tl.int32
    R: tl.constexpr = ROOM // LANES
    row_x, row_y = x_ptr + t * stride_x, y_ptr + t * stride_y
    words = ()
    for i in tl.static_range(4 if R == 1 else 10):
        words = words + (tl.load(words_ptr + i * LANES + lane),)

    xs, ys = (), ()
    lse_x, lse_y = 0.0, 0.0
    top_x, top_y = 0.0, 0.0
    if NARROW:
        xs = words_of(row_x, SX, WIDTH_X, TILES_X, EVEN_X)
        ys = words_of(row_y, SY, WIDTH_Y, TILES_Y, EVEN_Y)
        both = sorted_pair(greatest_of_lanes(xs, ys, DTYPE))
        most_x, most_y = guess(both, 0)
        most_x, most_y = low_half(flip_order(most_x), DTYPE), low_half(flip_order(most_y), DTYPE)
        if LSE:
            top_x, top_y = finite(most_x), finite(most_y)
            lse_x = tl.sum(shares(xs, top_x, DTYPE), axis=0)
            lse_y = tl.sum(shares(ys, top_y, DTYPE), axis=0)
    else:
        lanes_x = order_of(greatest(row_x, SX, WIDTH_X, EVEN_X))
        lanes_y = order_of(greatest(row_y, SY, WIDTH_Y, EVEN_Y))
        top_x, top_y = float_of(tl.max(lanes_x, axis=0)), float_of(tl.max(lanes_y, axis=0))
        most_x, most_y = tl.full((LANES,), 0.0, tl.float32) + top_x, tl.full((LANES,), 0.0, tl.float32) + top_y
        top_x, top_y = finite(top_x), finite(top_y)
        both = sorted_pair(((lanes_x >> 16) & 0xFFFF) | (lanes_y & -65536))

    order_x, order_y = guess(both, 17 if R == 1 else 25)
    limit_x, least_x = limits_of(order_x, 0.0, NARROW, DTYPE, True)
    limit_y, least_y = limits_of(order_y, 0.0, NARROW, DTYPE, True)
    mask_x, mask_y, n, total_x, total_y = marks(
        row_x, row_y, xs, ys, SX, SY, limit_x, limit_y, top_x, top_y, WIDTH_X, WIDTH_Y, EVEN_X, EVEN_Y, MASK, LSE
    )
    if not NARROW and LSE:
        lse_x, lse_y = tl.sum(total_x, axis=0), tl.sum(total_y, axis=0)
    if (n & 0xFFFF > ROOM) | (n >> 16 > ROOM):  # the second guess leaves too many in one row of a thousand
        order_x, order_y = guess(both, 15 if R == 1 else 23)
        limit_x, least_x = limits_of(order_x, 0.0, NARROW, DTYPE, True)
        limit_y, least_y = limits_of(order_y, 0.0, NARROW, DTYPE, True)
        mask_x, mask_y, n, _, _ = marks(
            row_x, row_y, xs, ys, SX, SY, limit_x, limit_y, top_x, top_y, WIDTH_X, WIDTH_Y, EVEN_X, EVEN_Y, MASK, False
        )

    x_places, y_places, numbers, sums = (
        zero_lists(tl.int32, R),
        zero_lists(tl.int32, R),
        zero_lists(tl.int32, R),
        zero_lists(tl.float32, R),
    )
    rounds = 0
    while rounds < 2:
        if (n & 0xFFFF > ROOM) | (n >> 16 > ROOM):
            mask_x, n_x = reduced_marks(mask_x, row_x, SX, least_x, most_x, K, ROOM, WIDTH_X, EVEN_X)
            mask_y, n_y = reduced_marks(mask_y, row_y, SY, least_y, most_y, K, ROOM, WIDTH_Y, EVEN_Y)
            n = n_x | (n_y << 16)
        keys_x, keys_y = sorted_keys(row_x, row_y, mask_x, mask_y, ROOM, WIDTH_X, WIDTH_Y)
        x, x_places = split_keys(keys_x, NARROW)
        y, y_places = split_keys(keys_y, NARROW)
        numbers, sums = select_pairs(x, y, words, K, BITS, NARROW)
        bound, best_x, best_y = broadcast_lane(sums[R - 1], (K - 1) & 31), broadcast_first(x[0]), broadcast_first(y[0])
        enough = ((n & 0xFFFF) >= K) | (least_x + best_y < bound)
        enough &= ((n >> 16) >= K) | (least_y + best_x < bound)
        rounds += 1 + tl.min(enough.to(tl.int32), axis=0)
        if rounds == 1:
            if NARROW and R == 2:  # read again, because keeping them would halve the number of warps
                xs = words_of(row_x, SX, WIDTH_X, TILES_X, EVEN_X)
                ys = words_of(row_y, SY, WIDTH_Y, TILES_Y, EVEN_Y)
            limit_x, least_x = limits_of(order_x, limit_of(bound, best_y), NARROW, DTYPE, False)
            limit_y, least_y = limits_of(order_y, limit_of(bound, best_x), NARROW, DTYPE, False)
            mask_x, mask_y, n, _, _ = marks(
                row_x, row_y, xs, ys, SX, SY, limit_x, limit_y, top_x, top_y,
                WIDTH_X, WIDTH_Y, EVEN_X, EVEN_Y, MASK, False,
            )  # fmt: skip

    if LSE:
        lse_x, lse_y = top_x + tl.log(lse_x), top_y + tl.log(lse_y)
        tl.store(lse_ptr + 2 * t + lane, tl.where(lane == 0, lse_x, lse_y), mask=lane < 2)
    results = weighted_scores(sums, lse_x + lse_y, K, LSE, WEIGHTS)
    for i in tl.static_range(R):
        pair = tl.load(words_ptr + len(words) * LANES + numbers[i])
        at = i * LANES + lane
        index = element_at(x_places, pair & 255) * SY + element_at(y_places, pair >> 8)
        index = tl.where(sums[i] == float("-inf"), -1, index)
        tl.store(indices_ptr + t * K + at, index, mask=at < K)
        tl.store(scores_ptr + t * K + at, results[i], mask=at < K)
