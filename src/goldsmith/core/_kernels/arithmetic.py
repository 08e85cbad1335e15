"""exp and sigmoid for Triton kernels, more accurate than Triton's own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x for x <= 88, to about 2 units in the last place for any x.

    tl.exp rounds x * log2(e) first, which costs |x| units; here only the remainder within +-ln(2)/2 is scaled.
    """
    # below -104 e^x is 0 in float32, and -inf would give inf - inf; on a GPU tl.maximum turns NaN into a number
    x = tl.where(x < -104.0, -104.0, x)
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = tl.fma(k, -0.693145751953125, x)
    rest = tl.fma(k, -1.428606765330187e-06, rest)
    half = tl.floor(k * 0.5)  # 2^k as two factors: 2^-140 is not a normal float32
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(half) * tl.exp2(k - half)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), without overflow on either side."""
    e = exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)
