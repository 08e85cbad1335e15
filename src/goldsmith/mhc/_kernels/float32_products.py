"""Products of float32 on bfloat16 tensor cores, which Triton's defaults do too coarsely."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wide(stride):
    """A stride in int64: streams that lie outermost are T * D apart, and three times that passes 2^31."""
    return tl.cast(stride, tl.int64)


@triton.jit
def rounded(v):
    """A float32 tile rounded to bfloat16 as a GPU does, in float32: the interpreter's own cast cuts the bits off."""
    bits = v.to(tl.uint32, bitcast=True)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
    return tl.where((v == v) & (tl.abs(v) != float("inf")), nearest.to(tl.float32, bitcast=True), v)


@triton.jit
def split(v, PARTS: tl.constexpr, INTERPRET: tl.constexpr):
    """v as a tuple of bfloat16 tiles, the greatest first: exact with 3 (8 + 8 + 8 bits), to 2^-17 with 2.

    An infinity is (inf, 0, 0), so that its product with what is finite is infinite. The interpreter, whose bfloat16 dot
    returns garbage, gets the same numbers in float32.
    """
    rest = v.to(tl.float32)
    parts = ()
    for i in tl.static_range(PARTS):
        part = rounded(rest) if INTERPRET else rest.to(tl.bfloat16)
        if i + 1 < PARTS:
            rest = tl.where(tl.abs(part.to(tl.float32)) == float("inf"), 0.0, rest - part.to(tl.float32))
        parts = parts + (part,)
    return parts


@triton.jit
def transposed(parts):
    turned = ()
    for i in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[i]),)
    return turned


@triton.jit
def finite(part):
    """A part with 0 for an infinity, for the products that its operand's lower parts make: inf - inf would be NaN."""
    return tl.where(tl.abs(part.to(tl.float32)) == float("inf"), 0.0, part.to(tl.float32)).to(part.dtype)


@triton.jit
def dot(a, b, INFINITE: tl.constexpr = False):
    """a @ b of two tuples of parts, to float32's precision where 3 parts are given; the smallest products come first.

    The product of parts i and j lies 2^-9(i + j) below the greatest; what lies below the last part kept is left out.
    INFINITE: b may hold infinities that have to come out as such; a's lower parts, of either sign or 0, then meet none.
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
                if INFINITE and i > 0 and i == PARTS - 1 - step:
                    total = tl.dot(a[i], finite(b[0]), total, input_precision="ieee")
                else:
                    total = tl.dot(a[i], b[PARTS - 1 - step - i], total, input_precision="ieee")
    return total
