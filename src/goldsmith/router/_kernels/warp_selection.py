"""product_topk of 16-bit logits with k > 64, one warp per row: extracts the next largest key or pair, one at a time.

Each lane keeps the four largest keys of its share of an axis, descending. The largest of the lanes' first keys is the
next rank of the axis. Pairs are extracted the same way: position a of a list holds the next pair (a, b) of rank a,
starting with b = 0. The largest of these pairs is the next of the result; among equals the lowest rank a wins. A rank
is extracted when a pair first needs it: about 12 ranks for 32 pairs. A lane whose four keys are used up reads its share
again. These are loops and not networks, because ten thousand instructions take longer to fetch than to run.
Bytes per row: the logits once, 8 per selected pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .sort_keys import minus_infinity
from .sorting_networks import INTERPRET, descending, greatest

LAST_PLACE = tl.constexpr(2047)  # a key's low bits hold the position
LANES = tl.constexpr(32)
B_BITS = tl.constexpr(8)  # a pair of ranks is a << B_BITS | b
LAST_B = tl.constexpr(255)
EMPTY = tl.constexpr(-0x7F800800)  # the key for no logit, which is that of -inf at the last position
SPENT = tl.constexpr(0x7FFFFFFF)  # replaces an extracted key; above every key
NOTHING = tl.constexpr(-(1 << 31))


@triton.jit
def columns(tile, WIDTH: tl.constexpr):
    """The WIDTH columns of [LANES, WIDTH] in bit-reversed order; no data moves between registers."""
    out = (tile,)
    for level in tl.static_range(3):
        if (1 << level) < WIDTH:
            parts = ()
            for i in tl.static_range(len(out)):
                a, b = tl.split(tl.reshape(out[i], (LANES, WIDTH // (2 << level), 2)))
                parts = parts + (a, b)
            out = parts
    flat = ()
    for i in tl.static_range(len(out)):
        flat = flat + (tl.reshape(out[i], (LANES,)),)
    return flat


@triton.jit
def bits_of(v):
    """The bits of float32 sums; a GPU's NaN is always 0x7FFFFFFF, numpy's can be any."""
    if INTERPRET:
        v = tl.where(v != v, float("nan"), v)
    return v.to(tl.int32, bitcast=True)


@triton.jit
def keyed(v, place):
    """Integers in the order of a stable descending sort: float32 bits on top, the reversed position below.

    A 16-bit number leaves eleven low bits free. Adding 0 merges the two zeros and all NaNs.
    """
    bits = tl.minimum(bits_of(v.to(tl.float32) + 0.0), 0x7FFFF000)
    return (bits ^ ((bits >> 31) & 0x7FFFF800)) + (LAST_PLACE - place)


@triton.jit
def number(key):
    """The float32 value of a key."""
    return ((key & -2048) ^ ((key >> 31) & 0x7FFFF800)).to(tl.float32, bitcast=True)


@triton.jit
def summed(x, y):
    """The sum x + y as an integer of the same order."""
    bits = bits_of(x + y)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def share(x):
    """e^x for x <= 0 as a term of a sum that is at least 1: its error of |x| ulp changes that sum by 1/3 ulp."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def shift_of(key):
    """The value of a key, 0 where that is not finite."""
    v = number(key)
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def lane_maxima(row, size, below, AGAIN: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, LSE: tl.constexpr):
    """(the four largest keys of each lane's share, descending; the axis's logsumexp). AGAIN: only keys < `below`."""
    least = tl.full((LANES,), EMPTY, tl.int32)
    best = (least, least, least, least)
    shift = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for at in range(0, size, LANES * WIDTH):
        place = at + (tl.arange(0, LANES) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
        if EVEN:
            v = tl.load(row + place)
        else:
            v = tl.load(row + place, mask=place < size, other=float("-inf"))
        key = keyed(v, place)
        if not EVEN:
            key = tl.where(place < size, key, EMPTY)
        if AGAIN:
            key = tl.where(key < below, key, EMPTY)
        parts = columns(key, WIDTH)
        if WIDTH == 8:
            first = descending((parts[0], parts[1], parts[2], parts[3]))
            parts = greatest(first, descending((parts[4], parts[5], parts[6], parts[7])))
        elif WIDTH == 4:
            parts = descending(parts)
        elif WIDTH == 2:
            parts = descending((parts[0], parts[1], least, least))
        else:
            parts = (parts[0], least, least, least)
        best = greatest(best, parts)
        if LSE:
            new = shift_of(best[0])
            total *= share(tl.minimum(shift - new, 0.0))  # a logit that is not finite makes the sum 0, Inf or NaN
            total += tl.sum(share(v.to(tl.float32) - new[:, None]), axis=1)
            shift = new
    lse = 0.0
    if LSE:
        new = shift_of(tl.max(best[0], axis=0))
        lse = new + tl.log(tl.sum(total * share(tl.minimum(shift - new, 0.0)), axis=0))
    return best, lse


@triton.jit
def next_key(best, last, row, size, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """(the next key of an axis after `last`, the lanes' lists without it)."""
    a, b, c, d = best
    key = tl.max(a, axis=0)
    if key == SPENT:
        again, _ = lane_maxima(row, size, last, True, WIDTH, EVEN, False)
        a, b, c, d = again
        key = tl.max(a, axis=0)
    out = a == key
    return key, (tl.where(out, b, a), tl.where(out, c, b), tl.where(out, d, c), tl.where(out, SPENT, d))


@triton.jit
def select_warp_kernel(
    x_ptr, y_ptr, scores_ptr, indices_ptr, lse_ptr, stride_x, stride_y, SX, SY,
    K: tl.constexpr, K_P: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr,
    EVEN_X: tl.constexpr, EVEN_Y: tl.constexpr, LSE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    DEAD: tl.constexpr = minus_infinity(tl.float32)
    row_x, row_y = x_ptr + t * stride_x, y_ptr + t * stride_y
    best_x, lse_x = lane_maxima(row_x, SX, 0, False, WIDTH_X, EVEN_X, LSE)
    best_y, lse_y = lane_maxima(row_y, SY, 0, False, WIDTH_Y, EVEN_Y, LSE)

    j = tl.arange(0, K_P)
    last_x, best_x = next_key(best_x, 0, row_x, SX, WIDTH_X, EVEN_X)
    last_y, best_y = next_key(best_y, 0, row_y, SY, WIDTH_Y, EVEN_Y)
    x_keys, y_keys = tl.where(j == 0, last_x, EMPTY), tl.where(j == 0, last_y, EMPTY)
    x, y, y_first = number(x_keys), number(y_keys), number(last_y)
    in_y = 1
    following = j << B_BITS
    order = tl.where((x == float("-inf")) | (y == float("-inf")), NOTHING, summed(x, y))  # only position 0 has a pair
    pairs = tl.full((K_P,), -1, tl.int32)
    step = 0
    s = tl.max(order, axis=0)
    while (step < K) & (s > DEAD):
        pair = tl.min(tl.where(order == s, following, 1 << 30), axis=0)
        pairs = tl.where(j == step, pair, pairs)
        step += 1
        after = pair + 1
        b = after & LAST_B
        if b == in_y:
            last_y, best_y = next_key(best_y, last_y, row_y, SY, WIDTH_Y, EVEN_Y)
            y, y_keys = tl.where(j == b, number(last_y), y), tl.where(j == b, last_y, y_keys)
            in_y += 1
        won = following == pair
        following = tl.where(won, after, following)
        y_next = tl.gather(y, tl.zeros_like(j) + (b & (K_P - 1)), 0)
        order = tl.where(won, tl.where(y_next == float("-inf"), DEAD, summed(x, y_next)), order)
        if b == 1:  # rank a's first pair was extracted, so the next rank's first pair is a candidate
            last_x, best_x = next_key(best_x, last_x, row_x, SX, WIDTH_X, EVEN_X)
            v, entered = number(last_x), j == (pair >> B_BITS) + 1
            x, x_keys = tl.where(entered, v, x), tl.where(entered, last_x, x_keys)
            order = tl.where(entered, tl.where(v == float("-inf"), DEAD, summed(v, y_first)), order)
        s = tl.max(order, axis=0)

    dead = pairs < 0
    a, b = tl.where(dead, 0, pairs >> B_BITS), tl.where(dead, 0, pairs & LAST_B)
    ix = LAST_PLACE - (tl.gather(x_keys, a, 0) & LAST_PLACE)
    iy = LAST_PLACE - (tl.gather(y_keys, b, 0) & LAST_PLACE)
    s = tl.where(dead, float("-inf"), tl.gather(x, a, 0) + tl.gather(y, b, 0))
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
