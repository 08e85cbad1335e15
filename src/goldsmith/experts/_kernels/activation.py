"""The activations of the family, in Triton."""

import triton
import triton.language as tl

from ...core._kernels.arithmetic import sigmoid


@triton.jit
def activated(g, u, alpha, limit, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """h = act(g, u); ACTIVATION is an index into experts._conventions.ACTIVATIONS"""
    if LIMITED:  # comparisons keep NaN, which minimum and maximum would drop
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    if ACTIVATION == 0:
        return g * sigmoid(g) * u
    elif ACTIVATION == 1:
        return 0.5 * g * (1 + tl.erf(g * 0.7071067811865476)) * u
    elif ACTIVATION == 2:
        return g * sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u  # (1 + tanh a) / 2 = sigmoid(2 a)
    elif ACTIVATION == 3:
        r = tl.where(g < 0, 0.0, g)
        return r * r * u
    else:
        return g * sigmoid(alpha * g) * (u + 1)
