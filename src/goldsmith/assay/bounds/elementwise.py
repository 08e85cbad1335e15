"""e = sum_i |df/da_i| e_i + c_f u |y|: rules for elementwise operators.

A rule is called as rule(context, y, *args, **kwargs) with the operator's arguments and its float64 result y.
`context(x)` gives the value and the error of an operand. The rule returns the error of y: a tensor that broadcasts to
y, or 0.0 for exact.

Propagation is exact rather than first order where that costs no more (division by b - e_b, monotone functions at
x - e and x + e). The bound is open (inf) where the error of a divisor, or of the argument of a logarithm or root,
exceeds 10 % of its value.

c_f is 1 for + - x and 4 for functions. Fast hardware paths are legal and need more: exp may be computed as
2^(x log2 e), whose rounded exponent costs 2 |x| u. On a GPU, Triton's `/` is div.full (2 ulp = 4 u) and its `sqrt` is
sqrt.approx (1 ulp = 2 u), so both count as functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .rule_context import Error, Operand, Rule, RuleContext

Units = float | Callable[[Tensor, Tensor], Tensor]  # roundings of a result: a number, or from argument and result
OPEN_AT = 0.1  # of |value|: a larger error in a divisor, or under a root or logarithm, opens the bound
_SMALL = 1e-6  # least relative step of a secant: float64 still resolves the difference


def exact(e: Error) -> bool:
    return isinstance(e, float) and e == 0.0


def total(*errors: Error) -> Error:
    """Sum of errors; exact ones cost nothing."""
    out: Error = 0.0
    for e in errors:
        if not exact(e):
            out = e if exact(out) else out + e
    return out


def scaled(factor: Operand, e: Error) -> Error:
    """|factor| e; an exact e stays 0.0, so that exactness is never lost"""
    return 0.0 if exact(e) else cast(Operand, abs(factor)) * e


def biggest(a: Error, b: Error) -> Error:
    if exact(a) or exact(b):
        return b if exact(a) else a
    return torch.maximum(*torch.broadcast_tensors(_tensor(a, b), _tensor(b, a)))


def _tensor(e: Error, like: Operand) -> Tensor:
    return e if isinstance(e, Tensor) else torch.as_tensor(e, dtype=torch.float64, device=getattr(like, "device", None))


def share(e: Error, value: Operand) -> Error:
    """e / |value|, with 0 / 0 = 0; an exact e stays 0.0, and an open one may be NaN"""
    if exact(e):
        return 0.0
    return torch.where(_tensor(e, value) == 0, 0.0, e / abs(value)) if isinstance(value, Tensor) else e / abs(value)


def opened(e: Error, relative: Error) -> Error:
    """e, or inf where the argument's relative error exceeds 10 %."""
    if exact(relative):
        return e
    relative = _tensor(relative, e)
    return torch.where(relative > OPEN_AT, torch.inf, e)


# arithmetic


def _add(context: RuleContext, y: Tensor, a: Operand, b: Operand, alpha: float = 1, *, sign: int = 1) -> Error:
    """If one operand is a sum of n terms, adds gamma_n |other|: an accumulator may start from it, as from a bias."""
    (va, ea), (vb, eb) = context(a), context(b)
    begun = total(
        *(
            context.gamma(n) * cast(Operand, abs(v))
            for n, v in ((context.terms_of(a), vb), (context.terms_of(b), va))
            if n > 1
        )
    )
    return total(
        ea, scaled(alpha, eb), context.rounding(y), begun if isinstance(y, Tensor) and y.is_floating_point() else 0.0
    )


def _mul(context: RuleContext, y: Tensor, a: Operand, b: Operand) -> Error:
    (va, ea), (vb, eb) = context(a), context(b)
    if _power_of_two(vb) or _power_of_two(va):
        return total(scaled(va, eb), scaled(vb, ea))
    cross = 0.0 if exact(ea) or exact(eb) else ea * eb
    return total(scaled(va, eb), scaled(vb, ea), cross, context.rounding(y))


def _power_of_two(x: Operand) -> bool:
    return not isinstance(x, Tensor) and math.isfinite(x) and math.frexp(abs(x))[0] == 0.5


def _div(context: RuleContext, y: Tensor, a: Operand, b: Operand, rounding_mode: str | None = None) -> Error:
    (va, ea), (vb, eb) = context(a), context(b)
    if rounding_mode is not None:
        quotient = cast(Tensor, va / vb)
        e = _div(context, quotient, a, b)
        snap = torch.floor if rounding_mode == "floor" else torch.trunc
        return _step(snap, quotient, e)
    if exact(eb):
        rounding = 0.0 if _power_of_two(vb) else context.rounding(y, 4)
        return total(share(ea, vb), rounding)
    relative = share(eb, vb)
    return opened(total(share(total(ea, scaled(y, eb)), vb) / (1 - relative), context.rounding(y, 4)), relative)


def _reciprocal(context: RuleContext, y: Tensor, x: Operand) -> Error:
    return _div(context, y, 1, x)


def _addcmul(context: RuleContext, y: Tensor, x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Error:
    (_, ex), (va, ea), (vb, eb) = context(x), context(a), context(b)
    product = va * vb
    return total(
        ex, scaled(value, total(scaled(va, eb), scaled(vb, ea), context.rounding(product, 2))), context.rounding(y)
    )


def _addcdiv(context: RuleContext, y: Tensor, x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Error:
    (_, ex), (va, _), (vb, _) = context(x), context(a), context(b)
    quotient = va / vb
    return total(
        ex, scaled(value, total(_div(context, quotient, a, b), context.rounding(quotient))), context.rounding(y)
    )


def _lerp(context: RuleContext, y: Tensor, a: Tensor, b: Tensor, weight: Operand) -> Error:
    (va, ea), (vb, eb), (vw, ew) = context(a), context(b), context(weight)
    gap = vb - va
    e_gap = total(ea, eb, context.rounding(gap))
    return total(ea, scaled(vw, e_gap), scaled(gap, ew), context.rounding(gap * vw, 2), context.rounding(y))


# functions of one argument


def _copies(context: RuleContext, y: Tensor, x: Operand, *_: object, **__: object) -> Error:
    return context(x)[1]


def smooth(f: Callable[[Tensor], Tensor], c: Units = 4, domain: float | None = None) -> Rule:
    """Rule for a monotone function: the larger of |f(x+h) - y| and |y - f(x-h)|, h >= e, scaled from h to e.

    domain: left end of the interval where f is defined; the bound is open where e exceeds 10 % of the distance to it.
    """

    def rule(context: RuleContext, y: Tensor, x: Tensor, *_: object, **__: object) -> Error:
        v, e = context(x)
        rounding = context.rounding(y, c(v, y) if callable(c) else c)
        if exact(e):
            return rounding
        h = torch.maximum(_tensor(e, v), v.abs() * _SMALL + 1e-30)
        spread: Error = torch.maximum((f(v + h) - y).abs(), (y - f(v - h)).abs()) * (e / h * 1.01)
        if domain is not None:
            spread = opened(spread, share(e, v - domain))
        return total(spread, rounding)

    return rule


def _exp_c(v: Tensor, y: Tensor) -> Tensor:
    return 4 + 2 * v.abs()


def _erf_c(v: Tensor, y: Tensor) -> Tensor:
    """12 roundings of 1, not of erf: fused kernels, and torch's gelu on a CPU, use Abramowitz and Stegun 7.1.26.

    Its error is 1.5e-7, and 7e-7 when evaluated in float32.
    """
    return 12 / y.abs().clamp(min=1e-30)


def _tanh_c(v: Tensor, y: Tensor) -> Tensor:
    """4 roundings of tanh and 4 of 1: Triton has no tanh, so its kernels compute 2 sigmoid(2 x) - 1."""
    return 4 + 4 / y.abs().clamp(min=1e-30)


def _exp(context: RuleContext, y: Tensor, x: Tensor) -> Error:
    v, e = context(x)
    rounding = context.rounding(y, 4 + 2 * v.abs())
    if exact(e):
        return rounding
    # y expm1(e) is the exact upward reach; above 0.1 use a difference, so that exp(-1e30 +- 1e22) stays 0
    return total(torch.where(_tensor(e, v) < OPEN_AT, y * torch.expm1(cast(Tensor, e)), torch.exp(v + e) - y), rounding)


def _sigmoid(context: RuleContext, y: Tensor, x: Tensor) -> Error:
    v, e = context(x)
    rounding = context.rounding(y, 4 + 2 * v.abs() * (1 - y))
    if exact(e):
        return rounding
    # neither y nor 1 - y changes by more than a factor exp(e)
    return total(torch.minimum(y, 1 - y) * torch.expm1(torch.clamp(cast(Tensor, e), max=700.0)), rounding)


def _bounded_slope(c: float = 4) -> Rule:
    """sin, cos: |slope| <= |other function| + e."""

    def rule(context: RuleContext, y: Tensor, x: Tensor) -> Error:
        v, e = context(x)
        if exact(e):
            return context.rounding(y, c)
        slope = torch.clamp((1 - y * y).clamp(min=0).sqrt() + e, max=1.0)
        return total(slope * e, context.rounding(y, c), 0.0)

    return rule


def _sqrt(context: RuleContext, y: Tensor, x: Tensor) -> Error:
    v, e = context(x)
    if exact(e):
        return context.rounding(y, 4)
    root = torch.maximum(y, torch.sqrt(_tensor(e, v)))
    e_out = torch.where(_tensor(e, v) > v, torch.inf, share(e, root))
    return total(torch.where(_tensor(e, v) == 0, 0.0, e_out), context.rounding(y, 4))


def _rsqrt(context: RuleContext, y: Tensor, x: Tensor) -> Error:
    v, e = context(x)
    if exact(e):
        return context.rounding(y, 4)
    q = share(e, v)
    # 1/sqrt(x - e) - 1/sqrt(x) <= y q / 2 / (1 - 3 q / 2)
    return opened(total(y * q * 0.5 / (1 - 1.5 * q), context.rounding(y, 4)), q)


def _pow(context: RuleContext, y: Tensor, base: Operand, exponent: Operand) -> Error:
    (vb, eb), (vp, ep) = context(base), context(exponent)
    if not isinstance(vp, Tensor):
        if vp in (0, 1):
            return 0.0 if vp == 0 else eb
        if vp == 2:
            return total(scaled(2 * vb, eb), 0.0 if exact(eb) else eb * eb, context.rounding(y))
        if vp == 0.5:
            return _sqrt(context, y, cast(Tensor, base))
        if vp == -0.5:
            return _rsqrt(context, y, cast(Tensor, base))
        if vp == -1:
            return _reciprocal(context, y, base)
        if vp > 0 and vp == int(vp):
            return total(_integer_power(cast(Tensor, vb), eb, int(vp)), context.rounding(y, max(4, int(vp))))
    relative = share(eb, vb)
    log = torch.log(torch.as_tensor(vb, dtype=torch.float64).abs())
    log = torch.where(torch.isfinite(log), log, 0.0)
    reach = total(scaled(vp, share(relative, 1 - relative) if not exact(relative) else 0.0), scaled(log, ep))
    moved = 0.0 if exact(reach) else y.abs() * torch.expm1(torch.clamp(_tensor(reach, y), max=700.0))
    return opened(total(moved, context.rounding(y, 4 + 2 * (vp * log).abs())), relative)


def _integer_power(v: Tensor, e: Error, n: int) -> Error:
    """(|x| + e)^n - |x|^n without cancellation: e sum_k (|x| + e)^k |x|^(n-1-k) <= n e (|x| + e)^(n-1)."""
    return 0.0 if exact(e) else n * e * (v.abs() + e) ** (n - 1)


def _step(f: Callable[[Tensor], Tensor], v: Tensor, e: Error) -> Error:
    """Change of a step function whose step lies within e of the argument."""
    if exact(e):
        return 0.0
    y = f(v)
    return torch.maximum((f(v + e) - y).abs(), (y - f(v - e)).abs())


def _steps(f: Callable[[Tensor], Tensor]) -> Rule:
    return lambda context, y, x, *_, **__: _step(f, *context(x))


# choices: uncertain where two values lie within their errors of each other


def _within(gap: Operand, reach: Error) -> Tensor:
    """Where rounding may close the gap; an open reach may be NaN."""
    reach = _tensor(reach, gap)
    return ((gap <= reach) | torch.isnan(reach)) & (reach != 0)


def compare(context: RuleContext, y: Tensor, a: Operand, b: Operand) -> Error:
    """1 where rounding may flip the answer, else 0. Inexact tensors that agree exactly are copies, which is certain."""
    (va, ea), (vb, eb) = context(a), context(b)
    reach = total(ea, eb)
    if exact(reach):
        return 0.0
    gap = cast(Operand, abs(va - vb))
    unsure = _within(gap, reach)
    if isinstance(b, Tensor):
        unsure = unsure & (gap != 0)
    return unsure.to(torch.float64) if bool(unsure.any()) else 0.0


def _where(context: RuleContext, y: Tensor, condition: Tensor, a: Operand, b: Operand) -> Error:
    (_, ec), (va, ea), (vb, eb) = context(condition), context(a), context(b)
    like = y if isinstance(y, Tensor) else condition
    chosen = 0.0 if exact(ea) and exact(eb) else torch.where(condition.bool(), _tensor(ea, like), _tensor(eb, like))
    if exact(ec):
        return chosen
    apart = cast(Operand, abs(va - vb)) + biggest(ea, eb)
    return torch.where(cast(Tensor, ec) > 0, cast(Tensor, apart), cast(Tensor, chosen))


def _masked_fill(context: RuleContext, y: Tensor, x: Operand, mask: Tensor, value: Operand) -> Error:
    return _where(context, y, mask, value, x)


def _logical(context: RuleContext, y: Tensor, *operands: Operand, **__: object) -> Error:
    return total(*(context(x)[1] for x in operands if isinstance(x, Tensor)))


def _extreme(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """maximum and minimum: the results at the largest and at the smallest arguments."""

    def rule(context: RuleContext, y: Tensor, a: Operand, b: Operand) -> Error:
        (va, ea), (vb, eb) = context(a), context(b)
        if exact(ea) and exact(eb):
            return 0.0
        like = y
        up = f(_tensor(va + ea, like), _tensor(vb + eb, like))
        down = f(_tensor(va - ea, like), _tensor(vb - eb, like))
        return torch.maximum(up - y, y - down)

    return rule


def _clamp(context: RuleContext, y: Tensor, x: Tensor, low: Any = None, high: Any = None) -> Error:
    e = context(x)[1]
    v = context(x)[0]
    e_ends = total(*(context(end)[1] for end in (low, high) if end is not None))
    if exact(e):
        return torch.where(v == y, 0.0, _tensor(e_ends, y)) if not exact(e_ends) else 0.0
    moved = torch.maximum(torch.clamp(v + e, low, high) - y, y - torch.clamp(v - e, low, high))
    return total(moved, e_ends)


def _threshold_backward(context: RuleContext, y: Tensor, grad: Tensor, x: Tensor, threshold: float) -> Error:
    """grad where x > threshold, else 0; either is legal where x lies within its error of the threshold."""
    (vg, eg), (vx, ex) = context(grad), context(x)
    passed = 0.0 if exact(eg) else torch.where(vx > threshold, eg, 0.0)
    if exact(ex):
        return passed
    unsure = _within((vx - threshold).abs(), ex)
    return torch.where(unsure, vg.abs() + eg, passed)


def _nan_to_num(context: RuleContext, y: Tensor, x: Tensor, *_: object, **__: object) -> Error:
    return context(x)[1]


RULES: dict[str, Rule] = {
    "add": _add, "sub": _add, "rsub": lambda context, y, a, b, alpha=1: _add(context, y, b, a, alpha),
    "mul": _mul, "div": _div, "true_divide": _div, "reciprocal": _reciprocal,
    "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp,
    "neg": _copies, "abs": _copies, "nan_to_num": _nan_to_num, "square": lambda context, y, x: _pow(context, y, x, 2),
    "exp": _exp, "exp2": smooth(torch.exp2), "expm1": smooth(torch.expm1, _exp_c),
    "log": smooth(torch.log, domain=0.0), "log2": smooth(torch.log2, domain=0.0),
    "log10": smooth(torch.log10, domain=0.0), "log1p": smooth(torch.log1p, domain=-1.0),
    "tanh": smooth(torch.tanh, _tanh_c), "sigmoid": _sigmoid, "erf": smooth(torch.erf, _erf_c),
    "erfc": smooth(torch.erfc, _exp_c), "sinh": smooth(torch.sinh, _exp_c), "atan": smooth(torch.atan),
    "asinh": smooth(torch.asinh),
    "sin": _bounded_slope(), "cos": _bounded_slope(), "sqrt": _sqrt, "rsqrt": _rsqrt, "pow": _pow,
    "floor": _steps(torch.floor), "ceil": _steps(torch.ceil), "round": _steps(torch.round),
    "trunc": _steps(torch.trunc), "sign": _steps(torch.sign), "sgn": _steps(torch.sign),
    "eq": compare, "ne": compare, "lt": compare, "le": compare, "gt": compare, "ge": compare,
    "where": _where, "masked_fill": _masked_fill,
    "logical_not": _logical, "logical_and": _logical, "logical_or": _logical, "logical_xor": _logical,
    "bitwise_not": _logical, "bitwise_and": _logical, "bitwise_or": _logical, "bitwise_xor": _logical,
    "maximum": _extreme(torch.maximum), "minimum": _extreme(torch.minimum), "fmax": _extreme(torch.fmax),
    "fmin": _extreme(torch.fmin), "clamp": _clamp, "clamp_min": lambda context, y, x, low: _clamp(context, y, x, low),
    "clamp_max": lambda context, y, x, high: _clamp(context, y, x, None, high),
    "relu": lambda context, y, x: _clamp(context, y, x, 0),
    "threshold_backward": _threshold_backward,
}  # fmt: skip
