"""Maps floats to integers of the same order, so that sorting integers gives a stable descending sort.

NaN is the largest and all NaNs are equal; -0 equals +0. A key's low bits hold the reversed position: among equal values
the first has the larger key, and no two keys of a row are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def infinity(DTYPE: tl.constexpr):
    """The bits of +inf."""
    return 0x7F80 if DTYPE == tl.bfloat16 else (0x7C00 if DTYPE == tl.float16 else 0x7F800000)


@triton.jit
def ordered(v):
    """int32 in the order of v (bfloat16, float16 or float32)."""
    WIDTH: tl.constexpr = v.dtype.primitive_bitwidth
    TOP: tl.constexpr = (1 << (WIDTH - 1)) - 1
    bits = v.to(tl.int16 if WIDTH == 16 else tl.int32, bitcast=True).to(tl.int32)
    bits = tl.where((bits & TOP) > infinity(v.dtype), TOP, bits)
    bits = tl.where(bits == -TOP - 1, 0, bits)
    return tl.where(bits < 0, bits ^ TOP, bits)


@triton.jit
def value(order, DTYPE: tl.constexpr):
    """The inverse of `ordered` for a number of DTYPE, as float32."""
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth
    TOP: tl.constexpr = (1 << (WIDTH - 1)) - 1
    bits = tl.where(order < 0, order ^ TOP, order)
    return bits.to(tl.int16 if WIDTH == 16 else tl.int32).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def minus_infinity(DTYPE: tl.constexpr):
    """`ordered` of -inf. A key not above it is masked; that includes `nothing`, which pads a row."""
    return -infinity(DTYPE) - 1


@triton.jit
def nothing(DTYPE: tl.constexpr):
    """An integer below `ordered` of every number, for padding."""
    return -(1 << (DTYPE.primitive_bitwidth - 1))
