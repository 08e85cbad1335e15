"""16-bit logits packed two to a word, so that product_topk with one warp per row compares two at a time.

A lane keeps the words of its share of each axis in registers. Its marks are the bits of one integer: bit w marks the
low half of word w and bit 16 + w the high half; words from 16 on use the upper 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sort_keys import ordered
from .sorting_networks import INTERPRET
from .warp_selection import columns

LANES = tl.constexpr(32)


@triton.jit
def words_of(row, size, WIDTH: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """TILES tensors of [LANES, WIDTH / 2] words, -inf past the last logit. WHOLE: no tail, and the row is 4-aligned."""
    HALF: tl.constexpr = WIDTH // 2
    out = ()
    for i in tl.static_range(TILES):
        word = i * LANES * HALF + (tl.arange(0, LANES) * HALF)[:, None] + tl.arange(0, HALF)[None, :]
        if WHOLE:
            w = tl.load(row.to(tl.pointer_type(tl.int32), bitcast=True) + word)
        else:
            low = tl.load(row + 2 * word, mask=2 * word < size, other=float("-inf"))
            high = tl.load(row + 2 * word + 1, mask=2 * word + 1 < size, other=float("-inf"))
            w = (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (
                high.to(tl.int16, bitcast=True).to(tl.int32) << 16
            )
        out = out + (w,)
    return out


@triton.jit
def low_half(w, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        v = (w << 16).to(tl.float32, bitcast=True)
    else:
        v = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return v


@triton.jit
def high_half(w, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        v = (w & -65536).to(tl.float32, bitcast=True)
    else:
        v = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return v


@triton.jit
def orders(w, DTYPE: tl.constexpr):
    """Both numbers of a word as 16-bit integers of the same order; all NaNs are equal."""
    a = ordered(w.to(tl.int16).to(DTYPE, bitcast=True))
    b = ordered((w >> 16).to(tl.int16).to(DTYPE, bitcast=True))
    return a, b


@triton.jit
def greater_words(a, b, DTYPE: tl.constexpr):
    """The maximum of the low halves and of the high halves; NaN is the largest."""
    if INTERPRET:
        a_low, a_high = orders(a, DTYPE)
        b_low, b_high = orders(b, DTYPE)
        w = flip_order((tl.maximum(a_low, b_low) & 0xFFFF) | (tl.maximum(a_high, b_high) << 16))
    else:
        text: tl.constexpr = "max.NaN." + ("bf16x2" if DTYPE == tl.bfloat16 else "f16x2") + " $0, $1, $2;"
        w = tl.inline_asm_elementwise(text, "=r,r,r", [a, b], tl.int32, True, 1)
    return w


@triton.jit
def flip_order(w):
    """Converts packed 16-bit numbers to integers of the same order, and back."""
    if INTERPRET:
        out = w ^ ((((w << 16) >> 31) & 0x7FFF) | ((w >> 31) & 0x7FFF0000))
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 s; prmt.b32 s, $1, 0, 0xBB99; lop3.b32 $0, s, 0x7FFF7FFF, $1, 0x6A; }",
            "=r,r", [w], tl.int32, True, 1,
        )  # fmt: skip
    return out


@triton.jit
def greatest_of_lanes(xs, ys, DTYPE: tl.constexpr):
    """Each lane's largest logits of x (low half) and y (high half), as integers of the same order."""
    best_x, best_y = xs[0], ys[0]
    for i in tl.static_range(1, len(xs)):
        best_x = greater_words(best_x, xs[i], DTYPE)
    for i in tl.static_range(1, len(ys)):
        best_y = greater_words(best_y, ys[i], DTYPE)
    best_x, best_y = greatest_word(best_x, DTYPE), greatest_word(best_y, DTYPE)
    evens = (best_x & 0xFFFF) | (best_y << 16)
    odds = ((best_x >> 16) & 0xFFFF) | (best_y & -65536)
    return flip_order(greater_words(evens, odds, DTYPE))


@triton.jit
def greatest_word(tile, DTYPE: tl.constexpr):
    parts = columns(tile, tile.shape[1])
    best = parts[0]
    for i in tl.static_range(1, len(parts)):
        best = greater_words(best, parts[i], DTYPE)
    return best


@triton.jit
def packed_limit(order, DTYPE: tl.constexpr):
    """The limit for `marked` in both halves of a word, from an ordered integer; at least the lowest finite number."""
    LOWEST: tl.constexpr = -0x7F80 if DTYPE == tl.bfloat16 else -0x7C00
    order = tl.maximum(order, LOWEST)
    return flip_order((order & 0xFFFF) | (order << 16))


@triton.jit
def at_most(v, DTYPE: tl.constexpr):
    """The largest number of DTYPE that is not above the float32 v, as an ordered integer."""
    near = tl.maximum(v, -3.3895313892515355e38 if DTYPE == tl.bfloat16 else -65504.0).to(DTYPE)
    return ordered(near) - (near.to(tl.float32) > v).to(tl.int32)


@triton.jit
def marked(tiles, limit, MASK: tl.constexpr, DTYPE: tl.constexpr):
    """Marks of each lane's logits that are not below the limit (equal in both halves)."""
    mask = tl.zeros((LANES,), tl.int32)
    beyond = tl.zeros((LANES,), tl.int32)
    HALF: tl.constexpr = tiles[0].shape[1]
    for i in tl.static_range(len(tiles)):
        if INTERPRET:
            bit = tl.full((HALF,), 1, tl.int32) << ((tl.arange(0, HALF) + i * HALF) & 15)
            bit = tl.expand_dims(bit, 0)
            of_low = tl.where(low_half(tiles[i], DTYPE) < low_half(limit, DTYPE)[:, None], 0, bit)
            of_high = tl.where(high_half(tiles[i], DTYPE) < low_half(limit, DTYPE)[:, None], 0, bit << 16)
            if i * HALF < 16:
                mask |= tl.sum(of_low | of_high, axis=1)
            else:
                beyond |= tl.sum(of_low | of_high, axis=1)
        else:
            parts = columns(tiles[i], HALF)
            for j in tl.static_range(HALF):
                if i * HALF < 16:
                    mask = marks_of_word(mask, parts[j], limit, i * HALF + bit_reversed(j, HALF), DTYPE)
                else:
                    beyond = marks_of_word(beyond, parts[j], limit, i * HALF - 16 + bit_reversed(j, HALF), DTYPE)
    if MASK == tl.int64:
        mask = (mask.to(tl.int64) & 0xFFFFFFFF) | (beyond.to(tl.int64) << 32)
    return mask


@triton.constexpr_function
def bit_reversed(j, length):
    """The column that `columns` returns as its j-th."""
    bits = length.bit_length() - 1
    return int(format(j, f"0{bits}b")[::-1], 2) if bits else 0


@triton.constexpr_function
def mark(at, narrow):
    """PTX: $0 is $1 with bit `at` (16 + at) set if the low (high) half of $2 is not below that of $3."""
    compare = f"set.geu.u32.{narrow} m, $2, $3;"
    return f"{{ .reg .b32 m; {compare} lop3.b32 $0, m, {(1 << at) | (1 << (at + 16))}, $1, 0xEA; }}"


@triton.jit
def marks_of_word(mask, w, limit, AT: tl.constexpr, DTYPE: tl.constexpr):
    text: tl.constexpr = mark(AT, "bf16x2" if DTYPE == tl.bfloat16 else "f16x2")
    return tl.inline_asm_elementwise(text, "=r,r,r,r", [mask, w, limit], tl.int32, True, 1)


@triton.jit
def shares(tiles, top, DTYPE: tl.constexpr):
    """Each lane's sum of exp(logit - top); rounding top * log2(e) costs no more than the sum's own rounding."""
    LOG2E: tl.constexpr = 1.4426950408889634
    back = tl.expand_dims(-top * LOG2E, 1)
    total = tl.zeros((LANES,), tl.float32)
    for i in tl.static_range(len(tiles)):
        a, b = tl.fma(low_half(tiles[i], DTYPE), LOG2E, back), tl.fma(high_half(tiles[i], DTYPE), LOG2E, back)
        total += tl.sum(tl.exp2(a) + tl.exp2(b), axis=1)
    return total
