"""act(a) and act'(a) in float32, by name."""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp, sigmoid


@triton.jit
def tanh_of(a):
    """tanh(sqrt(2 / pi) (a + 0.044715 a^3)) for |a| up to 30"""
    return 2.0 * sigmoid(2.0 * 0.7978845608028654 * (a + 0.044715 * a * a * a)) - 1.0


@triton.jit
def bounded(a):
    """a clamped to [-30, 30]: beyond, tanh_of is +-1 and its slope 0 even in float64; within, a^3 does not overflow."""
    a = tl.where(a > 30.0, 30.0, a)  # comparisons keep NaN
    return tl.where(a < -30.0, -30.0, a)


@triton.jit
def activated(a, KIND: tl.constexpr):
    if KIND == "silu":
        a = a * sigmoid(a)
    elif KIND == "gelu":
        a = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        a = 0.5 * a * (1.0 + tanh_of(bounded(a)))
    elif KIND == "relu":
        a = tl.where(a <= 0.0, 0.0, a)  # keeps NaN, which tl.maximum drops on a GPU
    elif KIND == "relu2":
        a = tl.where(a <= 0.0, 0.0, a)
        a = a * a
    return a


@triton.jit
def slope(a, KIND: tl.constexpr):
    """act'(a); for relu and relu2 the value that holds where a > 0."""
    if KIND == "silu":
        s = sigmoid(a)
        d = s * (1.0 + a * (1.0 - s))
    elif KIND == "gelu":
        d = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476)) + a * (exp(-0.5 * a * a) * 0.3989422804014327)
    elif KIND == "gelu_tanh":
        a = bounded(a)
        t = tanh_of(a)
        d = 0.5 * (1.0 + t) + 0.5 * a * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3 * 0.044715 * a * a)
    elif KIND == "relu2":
        d = 2.0 * a
    else:
        d = tl.full(a.shape, 1.0, tl.float32)
    return d
