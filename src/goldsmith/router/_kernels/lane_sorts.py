"""Sorts of lists of 32 numbers, one per lane, and the selection of the best pairs of two sorted lists.

The lists stay in registers: lanes exchange numbers by shuffles. Only pairs of ranks with (a + 1)(b + 1) <= K can be
among the K best. Their sums x_a + y_b are a table, cut into hooks: hook h is row h from column h on, followed by
column h from its end upwards. Along a hook the sums fall and then rise, so five steps sort it. Six more steps keep the
K best of two sorted lists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sorting_networks import INTERPRET
from .warp_selection import bits_of

LANES = tl.constexpr(32)
INFINITE = tl.constexpr(-(1 << 23))  # the bits of -inf


@triton.jit
def order_of(v):
    """int32 keys that compare as the float32 numbers do; +0 equals -0, a NaN without sign bit is the largest."""
    bits = bits_of(v + 0.0)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.constexpr_function
def steps(kind):
    """The network as steps (mirror, half): lanes l and l ^ mirror compare; the one without bit `half` keeps the better.

    "sort" sorts any list, "merge" a bitonic list, "runs" a list whose four parts of 8 lanes are bitonic.
    """
    merge = [(16 >> q, 16 >> q) for q in range(5)]
    if kind == "merge":
        return merge
    out = merge[2:] if kind == "runs" else []
    for block in (16, 32) if kind == "runs" else (2, 4, 8, 16, 32):
        out += [(block - 1, block // 2)] + [step for step in merge if step[0] < block // 2]
    return out


@triton.constexpr_function
def signs(turns):
    """PTX that defines s<first>_<second> for each pair: -1 in lanes with exactly one of the two bits, else 1.

    If second is 0, only the first bit counts. Five of these values are built from bits. The others are products, which
    cost half as much.
    """
    lines = [".reg .b32 u, v; .reg .f32 s1_0;", "shl.b32 u, $2, 31;", "and.b32 u, u, 0x80000000;"]
    lines += ["or.b32 u, u, 0x3F800000;", "mov.b32 s1_0, u;"]
    for bit in (2, 4, 8, 16):
        lines += [f".reg .f32 s{bit}_1;", f"shl.b32 v, $2, {32 - bit.bit_length()};"]
        lines += ["lop3.b32 v, u, 0x80000000, v, 0x78;", f"mov.b32 s{bit}_1, v;"]
    for first, second in sorted(set(turns)):
        if second != 1 and (first, second) != (1, 0):
            other = f"s{second}_1" if second else "s1_0"
            lines += [f".reg .f32 s{first}_{second};", f"mul.f32 s{first}_{second}, s{first}_1, {other};"]
    return lines


@triton.constexpr_function
def only_in_lanes():
    """PTX that traps unless element $2 is in lane $2, as Triton lays out 32 elements over a warp today.

    With another layout, the shuffles would be silently wrong. With this layout the assembler removes the trap as dead
    code; `tests/kernels` checks that.
    """
    return [".reg .b32 t; .reg .pred o;", "mov.u32 t, %tid.x; and.b32 t, t, 31;", "setp.ne.u32 o, t, $2; @o trap;"]


@triton.constexpr_function
def assembly_of_floats(kind, up):
    """The network of `steps(kind)` as PTX, for the float32 number $1 in lane $2.

    A lane that keeps the smaller number stores it negated. So every step is one maximum, followed by a product with 1
    or -1, which runs at twice the rate of a minimum.
    """
    halves = [half for _, half in steps(kind)]
    turns = [tuple(sorted(pair, reverse=True)) for pair in zip(halves, halves[1:], strict=False)]
    ends = [(halves[0], 0), (halves[-1], 0)]
    lines = [*only_in_lanes(), ".reg .f32 a, b; .reg .b32 l;", *signs([*turns, *ends])]
    negated = ["neg.f32 a, a;"] if up else []
    lines += ["mov.f32 a, $1;", *negated, f"mul.f32 a, a, s{halves[0]}_0;"]
    for i in range(len(halves)):
        mirror, half = steps(kind)[i]
        lines += ["mov.b32 l, a;", f"shfl.sync.bfly.b32 l, l, {mirror}, 31, 0xffffffff;", "mov.b32 b, l;"]
        lines += ["neg.f32 b, b;", "max.f32 a, a, b;"]
        turn = turns[i] if i < len(turns) else (half, 0)
        lines += [f"mul.f32 a, a, s{turn[0]}_{turn[1]};"] if turn[0] != turn[1] else []
    return "{\n" + "\n".join([*lines, *negated, "mov.f32 $0, a;"]) + "\n}"


@triton.constexpr_function
def assembly_of_integers(kind, up, wide):
    """The network of `steps(kind)` as PTX, for $1 in lane $2: a 64-bit integer if wide, otherwise two 16-bit ones."""
    bits = 64 if wide else 32
    lines = [*only_in_lanes(), ".reg .pred p<5>, q;", f".reg .b{bits} a, b;", ".reg .b32 l, m, h;"]
    for i in range(5):
        lines += [f"and.b32 l, $2, {1 << i};", f"setp.{'eq' if up else 'ne'}.b32 p{i}, l, 0;"]
    lines += [f"mov.b{bits} a, $1;"]
    for mirror, half in steps(kind):
        swap, p = f", {mirror}, 31, 0xffffffff;", f"p{half.bit_length() - 1}"
        if wide:
            lines += ["mov.b64 {l, h}, a;", "shfl.sync.bfly.b32 l, l" + swap, "shfl.sync.bfly.b32 h, h" + swap]
            lines += ["mov.b64 b, {l, h};", "setp.lt.s64 q, a, b;", f"xor.pred q, q, {p};", "selp.b64 a, b, a, q;"]
        else:
            lines += ["shfl.sync.bfly.b32 b, a" + swap, "max.s16x2 l, a, b;", "min.s16x2 m, a, b;"]
            lines += [f"selp.b32 a, m, l, {p};"]
    return "{\n" + "\n".join([*lines, f"mov.b{bits} $0, a;"]) + "\n}"


@triton.jit
def network(a, KIND: tl.constexpr, UP: tl.constexpr):
    """Runs the network `steps(KIND)` on 32 float32 or int64 numbers, one per lane; ascending if UP, else descending.

    On a GPU the network is one inline block: as a hundred Triton operations it takes seconds to compile (Triton 3.6).
    """
    lane = tl.arange(0, LANES)
    if INTERPRET:
        STEPS: tl.constexpr = steps(KIND)
        for i in tl.static_range(len(STEPS)):
            b = tl.gather(a, lane ^ STEPS[i][0], 0)
            a = tl.where(((lane & STEPS[i][1]) == 0) != UP, tl.maximum(a, b), tl.minimum(a, b))
    elif a.dtype == tl.int64:
        text: tl.constexpr = assembly_of_integers(KIND, UP, True)
        a = tl.inline_asm_elementwise(text, "=l,l,r", [a, lane], tl.int64, True, 1)
    else:
        floats: tl.constexpr = assembly_of_floats(KIND, UP)
        a = tl.inline_asm_elementwise(floats, "=f,f,r", [a, lane], tl.float32, True, 1)
    return a


@triton.jit
def bitonic_merge(a, UP: tl.constexpr):
    """Sorts a bitonic list of 32, descending, or ascending if UP."""
    return network(a, "merge", UP)


@triton.jit
def sorted_list(a, UP: tl.constexpr):
    return network(a, "sort", UP)


@triton.jit
def sorted_runs(a, UP: tl.constexpr):
    """Sorts a list of 32 whose four parts of 8 are bitonic, descending, or ascending if UP."""
    return network(a, "runs", UP)


@triton.jit
def sorted_pair(both):
    """Sorts two lists of 16-bit integers, packed as high and low halves, descending."""
    if INTERPRET:
        a, b = both >> 16, (both << 16) >> 16
        a, b = network(a.to(tl.float32), "sort", False), network(b.to(tl.float32), "sort", False)
        both = (a.to(tl.int32) << 16) | (b.to(tl.int32) & 0xFFFF)
    else:
        text: tl.constexpr = assembly_of_integers("sort", False, False)
        both = tl.inline_asm_elementwise(text, "=r,r,r", [both, tl.arange(0, LANES)], tl.int32, True, 1)
    return both


@triton.jit
def bitonic_merge_lists(a, UP: tl.constexpr):
    """Sorts a bitonic list of 32, or of 64 in two tensors, descending, or ascending if UP."""
    if len(a) == 1:
        out = (bitonic_merge(a[0], UP),)
    else:
        high, low = tl.maximum(a[0], a[1]), tl.minimum(a[0], a[1])
        if UP:
            out = (bitonic_merge(low, UP), bitonic_merge(high, UP))
        else:
            out = (bitonic_merge(high, UP), bitonic_merge(low, UP))
    return out


@triton.jit
def elementwise_max(a, b):
    out = ()
    for i in tl.static_range(len(a)):
        out = out + (tl.maximum(a[i], b[i]),)
    return out


@triton.jit
def broadcast_lane(a, lane):
    """Copies the number in a lane to every lane."""
    return tl.gather(a, tl.full((LANES,), lane, tl.int32), 0)


@triton.jit
def broadcast_first(a):
    return broadcast_lane(a, 0)


@triton.jit
def hook_sums(x, y, words, FINITE: tl.constexpr):
    """Sums x_a + y_b of all candidate pairs, in the layout of `words`; x and y are sorted, descending.

    Row 0 (len(y) tensors) and column 0 upwards (len(x)) come first; the other pairs have ranks below 32. A place
    without a pair gets -inf. With FINITE, no logit may be NaN or +inf.
    """
    lane = tl.arange(0, LANES)
    x_first, y_first = broadcast_first(x[0]), broadcast_first(y[0])
    sums = ()
    for i in tl.static_range(len(y)):
        sums = sums + (pair_sums(x_first, y[i], 0, FINITE),)  # row 0 has no empty place
    for i in tl.static_range(len(x)):
        back = tl.gather(x[len(x) - 1 - i], (32 - lane) & 31, 0)  # x[32 * (len(x) - i) - lane]
        if i == 1:
            back = tl.where(lane == 0, broadcast_first(x[1]), back)
        sums = sums + (pair_sums(back, y_first, words[len(y) + i], FINITE),)
    for i in tl.static_range(2 * len(x), len(words)):
        a, b = tl.gather(x[0], (words[i] >> 16) & 31, 0), tl.gather(y[0], (words[i] >> 24) & 31, 0)
        sums = sums + (pair_sums(a, b, words[i], FINITE),)
    return sums


@triton.jit
def pair_sums(x, y, word, FINITE: tl.constexpr):
    none = word < 0
    if not FINITE:
        none = none | (x == float("-inf")) | (y == float("-inf"))
    return tl.where(none, float("-inf"), x + y)


@triton.jit
def best_pairs(keys):
    """The 32 largest of the keys of 119 pairs, or the 64 largest of 280, descending."""
    if len(keys) == 4:
        best = (bitonic_merge(tl.maximum(keys[0], keys[1]), False),)
        best = (bitonic_merge(tl.maximum(best[0], bitonic_merge(keys[2], True)), False),)
        best = (bitonic_merge(tl.maximum(best[0], sorted_runs(keys[3], True)), False),)
    else:
        best = bitonic_merge_lists((tl.maximum(keys[0], keys[2]), tl.maximum(keys[1], keys[3])), False)
        best = bitonic_merge_lists(elementwise_max(best, bitonic_merge_lists((keys[4], keys[5]), True)), False)
        best = bitonic_merge_lists(elementwise_max(best, bitonic_merge_lists((keys[6], keys[7]), True)), False)
        rest = bitonic_merge_lists((bitonic_merge(keys[8], False), sorted_runs(keys[9], True)), True)
        best = bitonic_merge_lists(elementwise_max(best, rest), False)
    return best


@triton.jit
def float_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def short_keys(sums, words, BITS: tl.constexpr):
    """(keys, unfit). A key is a float32 number: the high bits of a sum, with the pair's number as its last BITS bits.

    unfit is the largest key whose sum has other last bits than zeros. A key of a negative sum holds the complement of
    the number, so that the first of equal sums has the larger key. A key of a sum of -inf holds no number.
    """
    LAST: tl.constexpr = (1 << BITS) - 1
    keys = ()
    unfit = tl.full((LANES,), float("-inf"), tl.float32)
    for i in tl.static_range(len(sums)):
        bits = bits_of(sums[i])
        key = float_bits((bits & (-1 - LAST)) | ((words[i] ^ (bits >> 31)) & LAST))
        if INTERPRET:
            key = tl.where(sums[i] == float("-inf"), float("-inf"), key)
        else:
            key = tl.maximum(key, float("-inf"))  # -inf with the number's bits is a NaN; max turns it back into -inf
        unfit = tl.where((bits & LAST) != 0, tl.maximum(unfit, key), unfit)
        keys = keys + (key,)
    return keys, unfit


@triton.jit
def long_keys(sums, words, BITS: tl.constexpr):
    keys = ()
    for i in tl.static_range(len(sums)):
        key = (order_of(sums[i]).to(tl.int64) << 32) | (words[i] & ((1 << BITS) - 1)).to(tl.int64)
        keys = keys + (tl.where(words[i] < 0, -(1 << 63), key),)
    return keys


@triton.jit
def select_by_short_keys(sums, words, K, BITS: tl.constexpr):
    """(numbers, sums, fit): as `select_pairs`; fit is 0 if a selected sum may need its last bits or is +inf or NaN."""
    LAST: tl.constexpr = (1 << BITS) - 1
    keys, unfit = short_keys(sums, words, BITS)
    best = best_pairs(keys)
    numbers = ()
    values = ()
    for i in tl.static_range(len(best)):
        bits = best[i].to(tl.int32, bitcast=True)
        numbers = numbers + ((bits ^ (bits >> 31)) & LAST,)
        values = values + (float_bits(bits & (-1 - LAST)),)
    kth = broadcast_lane(best[len(best) - 1], (K - 1) & 31).to(tl.int32, bitcast=True)
    least = float_bits(tl.where(kth < 0, kth | LAST, kth & (-1 - LAST)))  # every key below `least` has a smaller sum
    least = tl.where(kth == INFINITE, float("-inf"), least)
    fit = ((unfit < least) | (unfit == float("-inf"))) & (broadcast_first(sums[0]) < float("inf"))
    return numbers, values, tl.min(fit.to(tl.int32), axis=0)


@triton.jit
def select_by_long_keys(sums, words, BITS: tl.constexpr):
    best = best_pairs(long_keys(sums, words, BITS))
    numbers = ()
    values = ()
    for i in tl.static_range(len(best)):
        numbers = numbers + ((best[i] & ((1 << BITS) - 1)).to(tl.int32),)
        values = values + (float_of((best[i] >> 32).to(tl.int32)),)
    return numbers, values


@triton.jit
def select_pairs(x, y, words, K, BITS: tl.constexpr, NARROW: tl.constexpr):
    """(numbers, sums) of the selected pairs, as tensors of 32; a number is the reversed position (see sort_keys.py)."""
    if NARROW:
        numbers, values, fit = select_by_short_keys(hook_sums(x, y, words, True), words, K, BITS)
        if fit == 0:
            numbers, values = select_by_long_keys(hook_sums(x, y, words, False), words, BITS)
    else:
        numbers, values = select_by_long_keys(hook_sums(x, y, words, False), words, BITS)
    return numbers, values
