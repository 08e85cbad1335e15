"""Numbers as integers of the same order, so that a stable descending sort is a sort of integers.

NaN is the greatest and all NaNs are equal; -0 is +0. Below the value stands the place, reversed: among equals the first
is the greater, and no two keys of a row are equal.
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
    """The float32 of what `ordered` made of a number of DTYPE."""
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth
    TOP: tl.constexpr = (1 << (WIDTH - 1)) - 1
    bits = tl.where(order < 0, order ^ TOP, order)
    return bits.to(tl.int16 if WIDTH == 16 else tl.int32).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def minus_infinity(DTYPE: tl.constexpr):
    """What `ordered` makes of -inf: what is not above it is masked, and so is the place of no logit, which is below."""
    return -infinity(DTYPE) - 1


@triton.jit
def nothing(DTYPE: tl.constexpr):
    """Below every number."""
    return -(1 << (DTYPE.primitive_bitwidth - 1))
