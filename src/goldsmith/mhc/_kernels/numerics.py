"""Arithmetic that Triton's defaults do too coarsely: products of float32 on bf16 tensor cores, exp, sigmoid, division."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(v, PARTS: tl.constexpr):
    """v = hi + mid + lo in bfloat16: exact with 3 parts (8 + 8 + 8 bits), to 2^-17 with 2, PARTS = 1 for bfloat16 itself."""
    hi = v.to(tl.bfloat16)
    mid = hi
    lo = hi
    if PARTS > 1:
        rest = v.to(tl.float32) - hi.to(tl.float32)
        mid = rest.to(tl.bfloat16)
        if PARTS > 2:
            lo = (rest - mid.to(tl.float32)).to(tl.bfloat16)
    return hi, mid, lo


@triton.jit
def dot(a, b, A_PARTS: tl.constexpr, B_PARTS: tl.constexpr, INTERPRET: tl.constexpr):
    """a @ b to float32's precision from bfloat16 products; the smallest terms come first.

    A bfloat16 operand has one part. Products of parts i and j with i + j > 2 lie below 2^-24 and are left out. `tl.dot` on
    float32 is no way to say this: "ieee" leaves the tensor cores (and upcast bfloat16 may silently run tf32, triton #10176).

    The caller adds the result to its sum, and must not hand a running sum to `tl.dot` instead. Tensor cores truncate as they
    accumulate: 6.6e-6 relative over K = 2048, 1.4e-7 with a float32 addition every 64 (H100, 2026-11). And Triton 3.6 lets
    such a chain of wgmma run on while the next tile overwrites its operands: 0.4 to 4 % wrong in 4 of 14 configurations.
    """
    if INTERPRET:  # the interpreter's bfloat16 dot returns garbage
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        a0, a1, a2 = split(a, A_PARTS)
        b0, b1, b2 = split(b, B_PARTS)
        acc = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
        if A_PARTS > 2:
            acc = tl.dot(a2, b0, acc)
        if B_PARTS > 2:
            acc = tl.dot(a0, b2, acc)
        if (A_PARTS > 1) & (B_PARTS > 1):
            acc = tl.dot(a1, b1, acc)
        if A_PARTS > 1:
            acc = tl.dot(a1, b0, acc)
        if B_PARTS > 1:
            acc = tl.dot(a0, b1, acc)
        acc = tl.dot(a0, b0, acc)
    return acc


@triton.jit
def exp(x):
    """e^x for x <= 88 to about 2 units in the last place at any size of x.

    tl.exp rounds x * log2(e) first, which costs |x| units; here only the remainder within +-ln(2)/2 is scaled.
    """
    x = tl.maximum(x, -104.0)  # below, e^x is 0 in float32, and -inf would give inf - inf
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
