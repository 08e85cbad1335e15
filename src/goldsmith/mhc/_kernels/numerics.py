"""Arithmetic that Triton's defaults do too coarsely: products of float32 on bf16 tensor cores, exp, sigmoid."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wide(stride):
    """A stride in int64: streams that lie outermost are T * D apart, and three times that passes 2^31."""
    return tl.cast(stride, tl.int64)


@triton.jit
def split(v, PARTS: tl.constexpr, INTERPRET: tl.constexpr):
    """v as a tuple of bfloat16 tiles, the greatest first: exact with 3 (8 + 8 + 8 bits), to 2^-17 with 2.

    An infinity is (inf, 0, 0), so that its product with what is finite is infinite. The interpreter, whose bfloat16 dot
    returns garbage, gets the same numbers in float32.
    """
    rest = v.to(tl.float32)
    parts = ()
    for i in tl.static_range(PARTS):
        part = rest.to(tl.bfloat16)
        if i + 1 < PARTS:
            rest = tl.where(tl.abs(part.to(tl.float32)) == float("inf"), 0.0, rest - part.to(tl.float32))
        parts = parts + (part.to(tl.float32) if INTERPRET else part,)
    return parts


@triton.jit
def transposed(parts):
    turned = ()
    for i in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[i]),)
    return turned


@triton.jit
def dot(a, b):
    """a @ b of two tuples of parts, to float32's precision where 3 parts are given; the smallest products come first.

    The product of parts i and j lies 2^-9(i + j) below the greatest; what lies below the last part kept is left out.
    `tl.dot` on float32 is no way to say this: "ieee" leaves the tensor cores (and upcast bfloat16 may silently run
    tf32, triton #10176).

    The caller adds the result to its sum, and must not hand a running sum to `tl.dot` instead. Tensor cores truncate as
    they accumulate: 6.6e-6 relative over K = 2048, 1.4e-7 with a float32 addition every 64 (H100, 2026-11). And Triton
    3.6 lets such a chain of wgmma run on while the next tile overwrites its operands: 0.4 to 4 % wrong in 4 of 14
    configurations.
    """
    PARTS: tl.constexpr = max(len(a), len(b))
    total = tl.zeros((a[0].shape[0], b[0].shape[1]), tl.float32)
    for step in tl.static_range(PARTS):
        for i in tl.static_range(PARTS):
            if (i < len(a)) & (PARTS - 1 - step - i >= 0) & (PARTS - 1 - step - i < len(b)):
                total = tl.dot(a[i], b[PARTS - 1 - step - i], total, input_precision="ieee")
    return total


@triton.jit
def exp(x):
    """e^x for x <= 88 to about 2 units in the last place at any size of x.

    tl.exp rounds x * log2(e) first, which costs |x| units; here only the remainder within +-ln(2)/2 is scaled.
    """
    # below -104 e^x is 0 in float32, and -inf would give inf - inf; on a GPU tl.maximum would make a number of NaN
    x = tl.where(x < -104.0, -104.0, x)
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = tl.fma(k, -0.693145751953125, x)
    rest = tl.fma(k, -1.428606765330187e-06, rest)
    half = tl.floor(k * 0.5)  # 2^k in two factors: 2^-140 has no normal float32
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(half) * tl.exp2(k - half)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), without overflow on either side."""
    e = exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)
