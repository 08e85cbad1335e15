"""Gathers marked logits from 32 lanes into sorted lists of keys, one key per lane.

A mark is a bit of its lane's integer. Each slot of the list finds its lane by binary search in the prefix sums of the
mark counts, and the logit's position, from which it is read again, from the mark.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lane_sorts import LANES, bitonic_merge_lists, float_bits, float_of, order_of, sorted_list
from .sorting_networks import INTERPRET
from .warp_selection import bits_of

LAST_PLACE = tl.constexpr(2047)  # a key's last 11 bits hold the position


@triton.jit
def key_of(v, place, NARROW: tl.constexpr):
    """The key of a logit, unique in its row, in the order of a stable descending sort.

    NARROW: float32 values from 16 bits have 13 free low bits, except NaN. Their keys are compared as float32: the
    exponent is shifted down by one bit so that no key is NaN, and negative values hold the position not reversed.
    """
    if NARROW:
        bits = tl.minimum(bits_of(v + 0.0), 0x7FFFE000)
        key = float_bits(((bits >> 1) & -0x40000001) | ((LAST_PLACE - place) ^ ((bits >> 31) & LAST_PLACE)))
    else:
        key = (order_of(v).to(tl.int64) << 11) + (LAST_PLACE - place)
    return key


@triton.jit
def split_key(key, NARROW: tl.constexpr):
    """(value, position) of a key."""
    if NARROW:
        bits = key.to(tl.int32, bitcast=True)
        v = float_bits((bits & -(1 << 31)) | ((bits << 1) & 0x7FFFE000))
        place = LAST_PLACE - ((bits ^ (bits >> 31)) & LAST_PLACE)
    else:
        v = float_of((key >> 11).to(tl.int32))
        place = LAST_PLACE - (key & LAST_PLACE).to(tl.int32)
    return v, place


@triton.jit
def order_of_key(v, place, NARROW: tl.constexpr):
    """The key as an integer, for bisection."""
    if NARROW:
        bits = tl.minimum(bits_of(v + 0.0), 0x7FFFE000)
        key = (bits ^ ((bits >> 31) & 0x7FFFF800)) + (LAST_PLACE - place)
    else:
        key = key_of(v, place, NARROW)
    return key


@triton.jit
def bit_count(mask):
    """The number of set bits."""
    if INTERPRET:
        n = tl.sum((mask[:, None] >> tl.arange(0, mask.dtype.primitive_bitwidth)[None, :]) & 1, axis=1).to(tl.int32)
    elif mask.dtype == tl.int64:
        n = tl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [mask], tl.int32, True, 1)
    else:
        n = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], tl.int32, True, 1)
    return n


@triton.jit
def place_of(bit, lane, WIDTH: tl.constexpr, NARROW: tl.constexpr, MANY: tl.constexpr):
    if NARROW:
        HALF: tl.constexpr = WIDTH // 2
        word = bit & 15
        if MANY:
            word += (bit >> 5) << 4
        upper = (bit >> 4) & 1 if MANY else bit >> 4
        place = word // HALF * (LANES * WIDTH) + word % HALF * 2 + upper
    else:
        place = bit // WIDTH * (LANES * WIDTH) + bit % WIDTH
    return place.to(tl.int32, bitcast=True) + lane * WIDTH


@triton.jit
def lane_of(slot, inclusive_counts):
    """The lane that holds the mark number `slot`; inclusive_counts: prefix sums of the lanes' mark counts."""
    lane = tl.zeros((LANES,), tl.int32)
    for q in tl.static_range(5):
        lane = tl.where(tl.gather(inclusive_counts, lane + ((16 >> q) - 1), 0) <= slot, lane + (16 >> q), lane)
    return lane


@triton.jit
def marked_key(row, marks, lane, inside, WIDTH: tl.constexpr):
    """The key of the logit at the lowest bit of `marks` in lane `lane`; that of -inf if not `inside`."""
    MANY: tl.constexpr = marks.dtype == tl.int64
    NARROW: tl.constexpr = row.dtype.element_ty.primitive_bitwidth == 16
    lowest = (marks & -marks).to(tl.uint64 if MANY else tl.uint32, bitcast=True).to(tl.float32)
    bit = ((lowest.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.uint32, bitcast=True)
    place = place_of(bit, lane, WIDTH, NARROW, MANY)
    v = tl.load(row + place, mask=inside, other=float("-inf")).to(tl.float32)
    return key_of(v, tl.where(inside, place, LAST_PLACE), NARROW)


@triton.jit
def gathered_keys(
    row_x,
    row_y,
    mask_x,
    mask_y,
    counts,
    inclusive_counts,
    FIRST: tl.constexpr,
    WIDTH_X: tl.constexpr,
    WIDTH_Y: tl.constexpr,
):
    """The keys of both axes' marked logits FIRST to FIRST + 31, one per lane; -inf past the last.

    counts: marks of each lane, x | y << 16; inclusive_counts: their prefix sums.
    """
    slot = tl.arange(0, LANES) + FIRST
    lane_x, lane_y = lane_of(slot, inclusive_counts & 0xFFFF), lane_of(slot, inclusive_counts >> 16)
    total = tl.sum(counts, axis=0)
    before = inclusive_counts - counts
    ahead_x, ahead_y = slot - (tl.gather(before, lane_x, 0) & 0xFFFF), slot - (tl.gather(before, lane_y, 0) >> 16)
    marks_x, marks_y = tl.gather(mask_x, lane_x, 0), tl.gather(mask_y, lane_y, 0)
    for i in tl.static_range(3):  # a lane rarely has more than four marks, and an early exit costs more than it saves
        marks_x = tl.where(ahead_x > i, marks_x & (marks_x - 1), marks_x)
        marks_y = tl.where(ahead_y > i, marks_y & (marks_y - 1), marks_y)
    for i in range(3, tl.max(tl.maximum(counts & 0xFFFF, counts >> 16), axis=0) - 1):
        marks_x = tl.where(ahead_x > i, marks_x & (marks_x - 1), marks_x)
        marks_y = tl.where(ahead_y > i, marks_y & (marks_y - 1), marks_y)
    x = marked_key(row_x, marks_x, lane_x, slot < (total & 0xFFFF), WIDTH_X)
    y = marked_key(row_y, marks_y, lane_y, slot < (total >> 16), WIDTH_Y)
    return x, y


@triton.jit
def sorted_keys(row_x, row_y, mask_x, mask_y, ROOM: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_Y: tl.constexpr):
    """The keys of both axes' marked logits, sorted descending, as ROOM // 32 tensors per axis."""
    counts = bit_count(mask_x) | (bit_count(mask_y) << 16)
    inclusive_counts = tl.cumsum(counts, axis=0)
    x, y = gathered_keys(row_x, row_y, mask_x, mask_y, counts, inclusive_counts, 0, WIDTH_X, WIDTH_Y)
    xs, ys = (sorted_list(x, False),), (sorted_list(y, False),)
    if ROOM == 64:
        x, y = gathered_keys(row_x, row_y, mask_x, mask_y, counts, inclusive_counts, 32, WIDTH_X, WIDTH_Y)
        xs = bitonic_merge_lists((xs[0], sorted_list(x, True)), False)
        ys = bitonic_merge_lists((ys[0], sorted_list(y, True)), False)
    return xs, ys


@triton.jit
def split_keys(keys, NARROW: tl.constexpr):
    """(values, positions) of keys."""
    values = ()
    places = ()
    for i in tl.static_range(len(keys)):
        v, place = split_key(keys[i], NARROW)
        values = values + (v,)
        places = places + (place,)
    return values, places


@triton.jit
def element_at(a, place):
    """a[place] of a list stored in tensors of 32."""
    out = tl.gather(a[0], place & 31, 0)
    if len(a) == 2:
        out = tl.where(place < 32, out, tl.gather(a[1], place & 31, 0))
    return out
