"""Float32 matrix products on bfloat16 tensor cores, by splitting each operand; Triton's defaults are too inaccurate."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int64_stride(stride):
    """A stride in int64: with streams outermost the stride is T * D, and three times that exceeds 2^31."""
    return tl.cast(stride, tl.int64)


@triton.jit
def rounded(v):
    """A float32 tile rounded to bfloat16 values, as a GPU does; the interpreter's own cast truncates."""
    bits = v.to(tl.uint32, bitcast=True)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
    return tl.where((v == v) & (tl.abs(v) != float("inf")), nearest.to(tl.float32, bitcast=True), v)


@triton.jit
def split(v, PARTS: tl.constexpr, INTERPRET: tl.constexpr):
    """v as a tuple of bfloat16 tiles, largest first: exact with 3 parts (8 + 8 + 8 bits), to 2^-17 with 2.

    An infinity becomes (inf, 0, 0), so that its product with a finite number is infinite. The interpreter's bfloat16
    dot returns garbage, so it gets the same values in float32.
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
def settled(v, INTERPRET: tl.constexpr):
    """v, computed once. Triton would compute an operand of `tl.dot` again in the layout of the tensor cores' registers,
    which spills 1.4 KB a thread where v is made of four tiles; what it cannot look through goes to shared memory."""
    if INTERPRET:
        return v
    PACK: tl.constexpr = 32 // v.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=PACK)


@triton.jit
def transposed(parts):
    turned = ()
    for i in tl.static_range(len(parts)):
        turned = turned + (tl.trans(parts[i]),)
    return turned


@triton.jit
def finite(part):
    """The part with infinities replaced by 0. Products with the other operand's lower parts would give inf - inf."""
    return tl.where(tl.abs(part.to(tl.float32)) == float("inf"), 0.0, part.to(tl.float32)).to(part.dtype)


@triton.jit
def dot(a, b, INFINITE: tl.constexpr = False):
    """a @ b of two tuples of parts, to float32 precision with 3 parts; the smallest products are added first.

    The product of parts i and j is 2^-9(i + j) times the largest; products below the last part are skipped. INFINITE:
    infinities in b must appear in the result, so a's lower parts, which may have either sign or be 0, skip them.
    `tl.dot` on float32 cannot replace this: "ieee" does not use the tensor cores, and upcast bfloat16 may silently run
    tf32 (triton #10176).

    The caller must add the result to its own sum and must not pass a running sum to `tl.dot`, for two reasons. Tensor
    cores truncate while they accumulate: 6.6e-6 relative over K = 2048, but 1.4e-7 with a float32 addition every 64
    (H100, 2026-11). And Triton 3.6 lets a chain of wgmma continue while the next tile overwrites its operands: results
    were 0.4 to 4 % wrong in 4 of 14 configurations.
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
