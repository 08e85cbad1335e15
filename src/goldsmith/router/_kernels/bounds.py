"""product_topk with a row in every warp, k <= 64: bounds first, so that little is ever put in order.

1. Each lane's greatest logit of an axis is kept. These 32 and 32, sorted, already have k pairs; the k-th of them, found
   by halving, is a bound that no selected pair is below: so no logit that stays below it with the other axis's first.
2. The logits that are left, some 15 of an axis, are gathered from their lanes, one to a lane, and sorted. Where more
   are left than there is room for (ties, few lanes with all of the best), halving by key leaves k of the axis or more.
3. The pairs of ranks (a + 1)(b + 1) <= K, 119 for 32 and 280 for 64, are put in order (lists.py).

Keys are integers in the order that is wanted. A pair's is 32 bits, its sum without the last bits and its number in
their place, where these bits are 0 in all sums that matter, as with 16-bit logits they are; else 64 bits.
Bytes a row: the logits twice (the second time from L1), 8 a selected pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .lists import LANES, float_of, in_order, in_order_together, order_of, selected, settled_lists
from .networks import INTERPRET
from .warps import bits_of, columns, share

LAST_PLACE = tl.constexpr(2047)  # a key has the place in its last 11 bits
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def key_of(v, place, NARROW: tl.constexpr):
    """The key of a logit: in the order of a stable descending sort, no two alike."""
    if NARROW:  # a float32 that was 16 bits has its last 13 bits free, but for NaN
        bits = tl.minimum(bits_of(v + 0.0), 0x7FFFF000)
        key = (bits ^ ((bits >> 31) & 0x7FFFF800)) + (LAST_PLACE - place)
    else:
        key = (order_of(v).to(tl.int64) << 11) + (LAST_PLACE - place)
    return key


@triton.jit
def value_of(key, NARROW: tl.constexpr):
    if NARROW:
        v = ((key & -2048) ^ ((key >> 31) & 0x7FFFF800)).to(tl.float32, bitcast=True)
    else:
        v = float_of((key >> 11).to(tl.int32))
    return v


@triton.jit
def ones(mask):
    """How many bits are set."""
    if INTERPRET:
        n = tl.sum((mask[:, None] >> tl.arange(0, mask.dtype.primitive_bitwidth)[None, :]) & 1, axis=1).to(tl.int32)
    elif mask.dtype == tl.int64:
        n = tl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [mask], tl.int32, True, 1)
    else:
        n = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], tl.int32, True, 1)
    return n


@triton.jit
def tile_of(row, at, size, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    place = at + (tl.arange(0, LANES) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    if EVEN:
        v = tl.load(row + place)
    else:
        v = tl.load(row + place, mask=place < size, other=float("-inf"))
    return v.to(tl.float32), place


@triton.jit
def greater_of(best, v, WIDTH: tl.constexpr):
    parts = columns(v, WIDTH)
    for i in tl.static_range(WIDTH):
        best = tl.maximum(best, parts[i], propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit
def greatest_of_lanes(
    row_x, row_y, SX, SY, WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr, EVEN_X: tl.constexpr, EVEN_Y: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """The greatest of each lane's share of both axes; of axes ALIKE in length in one loop, two reads at a time."""
    best_x = tl.full((LANES,), float("-inf"), tl.float32)
    best_y = tl.full((LANES,), float("-inf"), tl.float32)
    for at in range(0, SX, LANES * WIDTH_X):
        v, _ = tile_of(row_x, at, SX, WIDTH_X, EVEN_X)
        if ALIKE:
            w, _ = tile_of(row_y, at, SX, WIDTH_X, EVEN_X)
            best_y = greater_of(best_y, w, WIDTH_X)
        best_x = greater_of(best_x, v, WIDTH_X)
    if not ALIKE:
        for at in range(0, SY, LANES * WIDTH_Y):
            v, _ = tile_of(row_y, at, SY, WIDTH_Y, EVEN_Y)
            best_y = greater_of(best_y, v, WIDTH_Y)
    return order_of(best_x), order_of(best_y)


@triton.jit
def marks_of(
    v,
    place,
    size,
    limit,
    BY_KEY: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    MASK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """WIDTH bits of each lane: which of its logits are not below `limit`."""
    bit = tl.full((WIDTH,), 1, MASK) << tl.arange(0, WIDTH).to(MASK)
    if BY_KEY:
        below = key_of(v, place, NARROW) < limit
    else:
        below = v < limit
    if not EVEN:
        below = below | (place >= size)
    return tl.sum(tl.where(below, 0, bit[None, :]), axis=1)


@triton.jit
def marked_by_key(row, size, limit, WIDTH: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr):
    NARROW: tl.constexpr = row.dtype.element_ty.primitive_bitwidth == 16
    mask = tl.zeros((LANES,), MASK)
    for at in range(0, size, LANES * WIDTH):
        v, place = tile_of(row, at, size, WIDTH, EVEN)
        mask |= marks_of(v, place, size, limit, True, WIDTH, EVEN, MASK, NARROW) << (at // LANES)
    return mask


@triton.jit
def marked(
    row_x, row_y, SX, SY, limit_x, limit_y, top_x, top_y,
    WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr, EVEN_X: tl.constexpr, EVEN_Y: tl.constexpr, ALIKE: tl.constexpr,
    MASK: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Of both axes: each lane's logits not below the limit as bits; each lane's sum of exp(logit - top)."""
    mask_x, mask_y = tl.zeros((LANES,), MASK), tl.zeros((LANES,), MASK)
    total_x, total_y = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    for at in range(0, SX, LANES * WIDTH_X):
        v, place = tile_of(row_x, at, SX, WIDTH_X, EVEN_X)
        if ALIKE:
            w, _ = tile_of(row_y, at, SX, WIDTH_X, EVEN_X)
            mask_y |= marks_of(w, place, SX, limit_y, False, WIDTH_X, EVEN_X, MASK, True) << (at // LANES)
            if LSE:
                total_y += tl.sum(share(w - top_y), axis=1)
        mask_x |= marks_of(v, place, SX, limit_x, False, WIDTH_X, EVEN_X, MASK, True) << (at // LANES)
        if LSE:
            total_x += tl.sum(share(v - top_x), axis=1)
    if not ALIKE:
        for at in range(0, SY, LANES * WIDTH_Y):
            w, place = tile_of(row_y, at, SY, WIDTH_Y, EVEN_Y)
            mask_y |= marks_of(w, place, SY, limit_y, False, WIDTH_Y, EVEN_Y, MASK, True) << (at // LANES)
            if LSE:
                total_y += tl.sum(share(w - top_y), axis=1)
    return mask_x, mask_y, total_x, total_y


@triton.jit
def limit_of(bound, other):
    """A logit below it has no pair that reaches the bound, where the other axis's greatest is `other`."""
    # what is lost in the sum and in the difference is a quarter of what is taken off here
    limit = (bound - other) - 2.0**-22 * (tl.abs(bound) + tl.abs(other))
    return a_number(limit)


@triton.jit
def a_number(limit):
    """No less than the lowest number, also where it is NaN: -inf is never asked for."""
    return tl.where(limit > LOWEST, limit, LOWEST)


@triton.jit
def fewer(mask, row, size, limit, mine, K: tl.constexpr, ROOM: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """(the marks, or where they are more than ROOM those of the first K or more of the axis; how many).

    limit: what is marked is not below it; mine: the greatest logit.
    """
    NARROW: tl.constexpr = row.dtype.element_ty.primitive_bitwidth == 16
    count = tl.sum(ones(mask), axis=0)
    if count > ROOM:
        low, high = key_of(limit, LAST_PLACE, NARROW) & -2048, key_of(mine, -1, NARROW)
        while (count > ROOM) | (count < K):
            middle = (low & high) + ((low ^ high) >> 1)
            mask = marked_by_key(row, size, middle, WIDTH, EVEN, mask.dtype)
            count = tl.sum(ones(mask), axis=0)
            low = tl.where(count > ROOM, middle, low)
            high = tl.where(count > ROOM, high, middle)
    return mask, count


@triton.jit
def finite(v):
    """v, 0 where it is not finite."""
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def lane_of(slot, upto):
    """The lane whose marks come to `slot`; upto: each lane's marks with those of the lanes before it."""
    lane = tl.zeros((LANES,), tl.int32)
    for q in tl.static_range(5):
        lane = tl.where(tl.gather(upto, lane + ((16 >> q) - 1), 0) <= slot, lane + (16 >> q), lane)
    return lane


@triton.jit
def marked_key(row, marks, lane, inside, WIDTH: tl.constexpr):
    """The key of the logit that is the lowest of `marks` in lane `lane`; that of -inf where not inside."""
    UNSIGNED: tl.constexpr = tl.uint64 if marks.dtype == tl.int64 else tl.uint32
    lowest = (marks & -marks).to(UNSIGNED, bitcast=True).to(tl.float32)
    bit = ((lowest.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.uint32, bitcast=True)
    place = ((bit // WIDTH) * (LANES * WIDTH) + bit % WIDTH).to(tl.int32, bitcast=True) + lane * WIDTH
    v = tl.load(row + place, mask=inside, other=float("-inf")).to(tl.float32)
    return key_of(v, tl.where(inside, place, LAST_PLACE), row.dtype.element_ty.primitive_bitwidth == 16)


@triton.jit
def listed(
    row_x, row_y, mask_x, mask_y, counts, upto, FIRST: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr
):
    """The keys of both axes' marked logits FIRST to FIRST + 31, one to a lane; -inf after the last.

    counts: marks of each lane, x | y << 16; upto: with those of the lanes before it.
    """
    slot = tl.arange(0, LANES) + FIRST
    lane_x, lane_y = lane_of(slot, upto & 0xFFFF), lane_of(slot, upto >> 16)
    total = tl.sum(counts, axis=0)
    before = upto - counts
    ahead_x, ahead_y = slot - (tl.gather(before, lane_x, 0) & 0xFFFF), slot - (tl.gather(before, lane_y, 0) >> 16)
    marks_x, marks_y = tl.gather(mask_x, lane_x, 0), tl.gather(mask_y, lane_y, 0)
    for _ in range(1, tl.max(tl.maximum(counts & 0xFFFF, counts >> 16), axis=0)):
        marks_x = tl.where(ahead_x > 0, marks_x & (marks_x - 1), marks_x)
        marks_y = tl.where(ahead_y > 0, marks_y & (marks_y - 1), marks_y)
        ahead_x -= 1
        ahead_y -= 1
    x = marked_key(row_x, marks_x, lane_x, slot < (total & 0xFFFF), WIDTH_X)
    y = marked_key(row_y, marks_y, lane_y, slot < (total >> 16), WIDTH_Y)
    return x, y


@triton.jit
def ranked(row_x, row_y, mask_x, mask_y, ROOM: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr):
    """The keys of both axes' marked logits, descending, as ROOM / 32 tensors each."""
    counts = ones(mask_x) | (ones(mask_y) << 16)
    upto = tl.cumsum(counts, axis=0)
    x, y = listed(row_x, row_y, mask_x, mask_y, counts, upto, 0, WIDTH_X, WIDTH_Y)
    xs, ys = (in_order(x, False),), (in_order(y, False),)
    if ROOM == 64:
        x, y = listed(row_x, row_y, mask_x, mask_y, counts, upto, 32, WIDTH_X, WIDTH_Y)
        xs = settled_lists((xs[0], in_order(x, True)), False)
        ys = settled_lists((ys[0], in_order(y, True)), False)
    return xs, ys


@triton.jit
def split(keys, NARROW: tl.constexpr):
    """(values, places)."""
    values = ()
    places = ()
    for i in tl.static_range(len(keys)):
        values = values + (value_of(keys[i], NARROW),)
        places = places + (LAST_PLACE - (keys[i] & LAST_PLACE).to(tl.int32),)
    return values, places


@triton.jit
def picked(a, place):
    """a[place] of a list in tensors of 32."""
    out = tl.gather(a[0], place & 31, 0)
    if len(a) == 2:
        out = tl.where(place < 32, out, tl.gather(a[1], place & 31, 0))
    return out


@triton.jit
def lists(DTYPE: tl.constexpr, R: tl.constexpr):
    out = ()
    for _ in tl.static_range(R):
        out = out + (tl.zeros((LANES,), DTYPE),)
    return out


@triton.jit
def kth(sums, K: tl.constexpr):
    """The k-th of them."""
    order = tl.where(tl.arange(0, LANES) == (K - 1) % 32, order_of(sums[len(sums) - 1]), -(1 << 31))
    return float_of(tl.max(order, axis=0))  # of integers, so that the compiler knows it for one number of all lanes


@triton.jit
def weighed(sums, lse, K: tl.constexpr, LSE: tl.constexpr, WEIGHTS: tl.constexpr):
    """The scores or weights of sums, descending in tensors of 32."""
    lane = tl.arange(0, LANES)
    top = 0.0
    total = tl.zeros((LANES,), tl.float32)
    if WEIGHTS == "softmax":
        top = tl.sum(tl.where(lane == 0, sums[0], 0.0), axis=0)  # the greatest, or NaN
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
            s = tl.where(dead, 0.0, exp(tl.where(s > 128.0, 128.0, s)))  # of +inf it makes NaN
        if WEIGHTS == "softmax":
            s = tl.where(dead, 0.0, tl.math.div_rn(exp(s - top), total))
        out = out + (s,)
    return out


@triton.jit
def bounded_kernel(
    x_ptr, y_ptr, words_ptr, scores_ptr, indices_ptr, lse_ptr, stride_x, stride_y, SX, SY,
    K: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr,
    EVEN_X: tl.constexpr, EVEN_Y: tl.constexpr, ALIKE: tl.constexpr, MANY: tl.constexpr, LSE: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    R: tl.constexpr = ROOM // LANES
    row_x, row_y = x_ptr + t * stride_x, y_ptr + t * stride_y
    words = ()
    for i in tl.static_range(4 if R == 1 else 10):
        words = words + (tl.load(words_ptr + i * LANES + lane),)

    lanes_x, lanes_y = greatest_of_lanes(row_x, row_y, SX, SY, WIDTH_X, WIDTH_Y, EVEN_X, EVEN_Y, ALIKE)
    best_x, best_y = float_of(tl.max(lanes_x, axis=0)), float_of(tl.max(lanes_y, axis=0))
    lanes_x, lanes_y = in_order_together(lanes_x >> 16, lanes_y >> 16)
    guess = lane == (16 if R == 1 else 24)
    limit_x = a_number(float_of(tl.max(tl.where(guess, lanes_x, -32768), axis=0) << 16))
    limit_y = a_number(float_of(tl.max(tl.where(guess, lanes_y, -32768), axis=0) << 16))

    top_x, top_y = finite(best_x), finite(best_y)
    total_x, total_y = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    x_places, y_places, numbers, sums = lists(tl.int32, R), lists(tl.int32, R), lists(tl.int32, R), lists(tl.float32, R)
    rounds = 0
    while rounds < 2:
        mask_x, mask_y, total_x, total_y = marked(
            row_x, row_y, SX, SY, limit_x, limit_y, top_x, top_y,
            WIDTH_X, WIDTH_Y, EVEN_X, EVEN_Y, ALIKE, tl.int64 if MANY else tl.int32, LSE,
        )  # fmt: skip
        mask_x, n_x = fewer(mask_x, row_x, SX, limit_x, best_x, K, ROOM, WIDTH_X, EVEN_X)
        mask_y, n_y = fewer(mask_y, row_y, SY, limit_y, best_y, K, ROOM, WIDTH_Y, EVEN_Y)
        xs, ys = ranked(row_x, row_y, mask_x, mask_y, ROOM, WIDTH_X, WIDTH_Y)
        x, x_places = split(xs, NARROW)
        y, y_places = split(ys, NARROW)
        numbers, sums = selected(x, y, words, K, BITS, NARROW)
        bound = kth(sums, K)
        enough_x, enough_y = (n_x >= K) | (limit_x + best_y < bound), (n_y >= K) | (limit_y + best_x < bound)
        rounds += tl.where(enough_x & enough_y, 2, 1)
        limit_x, limit_y = limit_of(bound, best_y), limit_of(bound, best_x)

    lse_x, lse_y = 0.0, 0.0
    if LSE:
        lse_x, lse_y = top_x + tl.log(tl.sum(total_x, axis=0)), top_y + tl.log(tl.sum(total_y, axis=0))
        tl.store(lse_ptr + 2 * t, lse_x)
        tl.store(lse_ptr + 2 * t + 1, lse_y)
    results = weighed(sums, lse_x + lse_y, K, LSE, WEIGHTS)
    for i in tl.static_range(R):
        pair = tl.load(words_ptr + len(words) * LANES + numbers[i])
        at = i * LANES + lane
        index = picked(x_places, pair & 255) * SY + picked(y_places, pair >> 8)
        index = tl.where(sums[i] == float("-inf"), -1, index)
        tl.store(indices_ptr + t * K + at, index, mask=at < K)
        tl.store(scores_ptr + t * K + at, results[i], mask=at < K)
