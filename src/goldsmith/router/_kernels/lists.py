"""Lists of 32 numbers, one to a lane, and what is made of two: a sort, and the best pairs of two lists in order.

Nothing but shuffles, minima and maxima. The pairs of ranks that can be among the first K at all, (a + 1)(b + 1) <= K,
come as hooks: row h of the table of sums from column h on, and column h below it upwards, are one list that falls and
rises, and is in order after five steps; of two lists in order the K best are after six.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .networks import INTERPRET
from .warps import bits_of

LANES = tl.constexpr(32)
NO_PAIR = tl.constexpr(-(1 << 31))


@triton.jit
def order_of(v):
    """int32 in the order of float32; +0 and -0 are one, NaN is the greatest."""
    bits = bits_of(v + 0.0)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.constexpr_function
def steps(sort):
    """(mirror, half): a lane's number meets that of lane ^ mirror, and lanes without the bit half take the better."""
    merge = [(16 >> q, 16 >> q) for q in range(5)]
    two = []
    for block in (2, 4, 8, 16, 32):
        two += [(block - 1, block // 2)] + [step for step in merge if step[0] < block // 2]
    return two if sort else merge


@triton.constexpr_function
def assembly(sort, kind, up):
    """The steps as PTX, for $1 in lane $2; kind is s32, s64 or s16x2."""
    wide = kind == "s64"
    lines = [".reg .pred p<5>;", f".reg .b{64 if wide else 32} a, b;", ".reg .b32 l, m, h;"]
    for q in range(5):
        lines += [f"and.b32 l, $2, {1 << q};", f"setp.{'ne' if up else 'eq'}.b32 p{q}, l, 0;"]
    lines += [f"mov.b{64 if wide else 32} a, $1;"]
    for mirror, half in steps(sort):
        swap = f", {mirror}, 31, 0xffffffff;"
        if wide:
            lines += ["mov.b64 {l, h}, a;", "shfl.sync.bfly.b32 l, l" + swap, "shfl.sync.bfly.b32 h, h" + swap]
            lines += ["mov.b64 b, {l, h};"]
        else:
            lines += ["shfl.sync.bfly.b32 b, a" + swap]
        p = f"p{half.bit_length() - 1}"
        if wide:
            lines += [f"@{p} max.s64 a, a, b;", f"@!{p} min.s64 a, a, b;"]
        else:
            lines += [f"max.{kind} l, a, b;", f"min.{kind} m, a, b;", f"selp.b32 a, l, m, {p};"]
    lines += [f"mov.b{64 if wide else 32} $0, a;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def network(a, SORT: tl.constexpr, UP: tl.constexpr):
    """A list of 32, one to a lane, in order; any list with SORT, else a bitonic one.

    On a GPU one inline block: as some hundred operations of Triton a sort takes the compiler seconds (Triton 3.6).
    """
    lane = tl.arange(0, LANES)
    if INTERPRET:
        STEPS: tl.constexpr = steps(SORT)
        for i in tl.static_range(len(STEPS)):
            b = tl.gather(a, lane ^ STEPS[i][0], 0)
            a = tl.where(((lane & STEPS[i][1]) == 0) != UP, tl.maximum(a, b), tl.minimum(a, b))
    else:
        WIDE: tl.constexpr = a.dtype == tl.int64
        text: tl.constexpr = assembly(SORT, "s64" if WIDE else "s32", UP)
        a = tl.inline_asm_elementwise(text, "=l,l,r" if WIDE else "=r,r,r", [a, lane], a.dtype, True, 1)
    return a


@triton.jit
def settled(a, UP: tl.constexpr):
    """A bitonic list in order, descending or UP."""
    return network(a, False, UP)


@triton.jit
def in_order(a, UP: tl.constexpr):
    return network(a, True, UP)


@triton.jit
def in_order_together(a, b):
    """Two lists of 16-bit integers (as int32), descending."""
    if INTERPRET:
        a, b = network(a, True, False), network(b, True, False)
    else:
        text: tl.constexpr = assembly(True, "s16x2", False)
        both = (a << 16) | (b & 0xFFFF)
        both = tl.inline_asm_elementwise(text, "=r,r,r", [both, tl.arange(0, LANES)], tl.int32, True, 1)
        a, b = both >> 16, (both << 16) >> 16
    return a, b


@triton.jit
def settled_lists(a, UP: tl.constexpr):
    """A bitonic list of 32, or of 64 in two tensors, in order."""
    if len(a) == 1:
        out = (settled(a[0], UP),)
    else:
        high, low = tl.maximum(a[0], a[1]), tl.minimum(a[0], a[1])
        if UP:
            out = (settled(low, UP), settled(high, UP))
        else:
            out = (settled(high, UP), settled(low, UP))
    return out


@triton.jit
def greater(a, b):
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.maximum(a[i], b[i]),)
    return out


@triton.jit
def first(a):
    """What lane 0 has, in every lane."""
    return tl.gather(a, tl.zeros((LANES,), tl.int32), 0)


@triton.jit
def hook_sums(x, y, words, FINITE: tl.constexpr):
    """Sums of all pairs of ranks, as many tensors as words has; x and y are values, descending.

    Row 0 and column 0 (upwards) first, as long as x and y are; the rest has ranks below 32. Where there is no pair the
    sum is -inf. FINITE: right where no logit is NaN or +inf, else without order.
    """
    lane = tl.arange(0, LANES)
    x_first, y_first = first(x[0]), first(y[0])
    sums = ()
    for i in tl.static_range(len(y)):
        sums = sums + (added(x_first, y[i], words[i], FINITE),)
    for i in tl.static_range(len(x)):
        back = tl.gather(x[len(x) - 1 - i], (32 - lane) & 31, 0)  # x[room - lane]
        if i == 1:
            back = tl.where(lane == 0, first(x[1]), back)
        sums = sums + (added(back, y_first, words[len(y) + i], FINITE),)
    for i in tl.static_range(2 * len(x), len(words)):
        a, b = tl.gather(x[0], words[i] & 31, 0), tl.gather(y[0], (words[i] >> 8) & 31, 0)
        sums = sums + (added(a, b, words[i], FINITE),)
    return sums


@triton.jit
def added(x, y, word, FINITE: tl.constexpr):
    none = word < 0
    if not FINITE:
        none = none | (x == float("-inf")) | (y == float("-inf"))
    return tl.where(none, float("-inf"), x + y)


@triton.jit
def best_pairs(keys):
    """The 32 or 64 greatest keys, descending, of those of 119 or 280 pairs."""
    if len(keys) == 4:
        best = (settled(tl.maximum(keys[0], keys[1]), False),)
        best = (settled(tl.maximum(best[0], settled(keys[2], True)), False),)
        best = (settled(tl.maximum(best[0], in_order(keys[3], True)), False),)
    else:
        best = settled_lists((tl.maximum(keys[0], keys[2]), tl.maximum(keys[1], keys[3])), False)
        best = settled_lists(greater(best, settled_lists((keys[4], keys[5]), True)), False)
        best = settled_lists(greater(best, settled_lists((keys[6], keys[7]), True)), False)
        rest = settled_lists((settled(keys[8], False), in_order(keys[9], True)), True)
        best = settled_lists(greater(best, rest), False)
    return best


@triton.jit
def short_keys(sums, words, BITS: tl.constexpr):
    """(32-bit keys of pairs, the greatest whose sum did not fit)."""
    LAST: tl.constexpr = (1 << BITS) - 1
    keys = ()
    unfit = tl.full((LANES,), NO_PAIR, tl.int32)
    for i in tl.static_range(len(sums)):
        bits = bits_of(sums[i] + 0.0)
        key = (bits ^ ((bits >> 31) & (0x7FFFFFFF - LAST))) & (-1 - LAST)
        unfit = tl.maximum(unfit, tl.where((bits & LAST) != 0, key, NO_PAIR))
        keys = keys + (key | ((words[i] >> 16) & LAST),)  # of no pair: of -inf, behind all pairs
    return keys, unfit


@triton.jit
def long_keys(sums, words):
    keys = ()
    for i in tl.static_range(len(sums)):
        key = (order_of(sums[i]).to(tl.int64) << 32) | (words[i] >> 16).to(tl.int64)
        keys = keys + (tl.where(words[i] < 0, -(1 << 63), key),)
    return keys


@triton.jit
def by_short_keys(sums, words, K: tl.constexpr, BITS: tl.constexpr):
    """`selected`, and whether it is: not where a sum that matters has bits in the number's place, or is not finite."""
    LAST: tl.constexpr = (1 << BITS) - 1
    keys, unfit = short_keys(sums, words, BITS)
    best = best_pairs(keys)
    numbers = ()
    found = ()
    for i in tl.static_range(len(best)):
        key = best[i] & (-1 - LAST)
        numbers = numbers + (best[i] & LAST,)
        found = found + ((key ^ ((key >> 31) & (0x7FFFFFFF - LAST))).to(tl.float32, bitcast=True),)
    kth = tl.arange(0, LANES) == (K - 1) % 32
    least = tl.min(tl.where(kth, best[len(best) - 1] & (-1 - LAST), 0x7FFFFFFF), axis=0)
    fit = (tl.max(unfit, axis=0) < least) & (tl.max(order_of(sums[0]), axis=0) < 0x7F800000)
    return numbers, found, fit


@triton.jit
def by_long_keys(sums, words, BITS: tl.constexpr):
    best = best_pairs(long_keys(sums, words))
    numbers = ()
    found = ()
    for i in tl.static_range(len(best)):
        numbers = numbers + ((best[i] & ((1 << BITS) - 1)).to(tl.int32),)
        found = found + (float_of((best[i] >> 32).to(tl.int32)),)
    return numbers, found


@triton.jit
def selected(x, y, words, K: tl.constexpr, BITS: tl.constexpr, NARROW: tl.constexpr):
    """(the numbers of the selected pairs, reversed; their sums), each as tensors of 32."""
    if NARROW:
        numbers, found, fit = by_short_keys(hook_sums(x, y, words, True), words, K, BITS)
        if fit == 0:
            numbers, found = by_long_keys(hook_sums(x, y, words, False), words, BITS)
    else:
        numbers, found = by_long_keys(hook_sums(x, y, words, False), words, BITS)
    return numbers, found
