"""e = sum_i e_i + gamma_n sum_i |a_i b_i|: error bounds of sums, products, norms, softmax and matrix products.

They hold for any order of the additions. n terms get gamma_n, not gamma_(n-1), because a dot also rounds n products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .elementwise import exact, scaled, total
from .rule_context import Dim, Error, Errors, Operand, Rule, RuleContext


def _count(x: Tensor, y: Tensor) -> int:
    return x.numel() // max(y.numel(), 1)


def _sum(
    context: RuleContext,
    y: Tensor,
    x: Tensor,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Error:
    v, e = context(x)
    n = _count(x, y)
    if n <= 1 or not x.is_floating_point():
        return 0.0 if exact(e) else _reduce(torch.sum, e.expand_as(v) if isinstance(e, Tensor) else e, dim, keepdim)
    return _reduce(torch.sum, total(e, context.gamma(n) * (v.abs() + e)), dim, keepdim)


def _reduce(f: Callable[..., Tensor], t: Any, dim: Dim, keepdim: bool) -> Tensor:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        out = f(t)
        return out.reshape((1,) * t.dim()) if keepdim else out
    return f(t, dim=dim, keepdim=keepdim)


def _mean(
    context: RuleContext,
    y: Tensor,
    x: Tensor,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Error:
    n = _count(x, y)
    return total(_sum(context, y, x, dim, keepdim) / max(n, 1), context.rounding(y, 4))


def _prod(
    context: RuleContext,
    y: Tensor,
    x: Tensor,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Error:
    """prod(|a| + e) - prod|a| + gamma_n prod(|a| + e), where every factor has its largest magnitude."""
    v, e = context(x)
    dims = () if dim is None else (dim, keepdim)
    far = torch.prod(v.abs() + e, *dims)
    moved = 0.0 if exact(e) else far - y.abs()
    if not exact(e) and context.u < 1e-12:  # the difference is itself rounded in float64
        moved = moved + _count(x, y) * context.u * far
    if _count(x, y) <= 1:
        return _reduce(torch.sum, e + 0 * v, dim, keepdim)
    return total(moved, context.gamma(_count(x, y)) * far)


def _cumulative(context: RuleContext, y: Tensor, x: Tensor, dim: int, **_: object) -> Error:
    """Error of cumsum: sum_{j<=i} e_j + gamma_i sum_{j<=i} (|a_j| + e_j); partial sum i has i additions."""
    v, e = context(x)
    if v.dim() == 0:
        return e
    carried = 0.0 if exact(e) else torch.cumsum(e + 0 * v, dim)
    return total(carried, _ramp(context, v, dim) * torch.cumsum(v.abs() + e, dim))


def _cumprod(context: RuleContext, y: Tensor, x: Tensor, dim: int, **_: object) -> Error:
    v, e = context(x)
    if v.dim() == 0:
        return e
    far = torch.cumprod(v.abs() + e, dim)
    ramp = _ramp(context, v, dim)
    moved = 0.0 if exact(e) else far - y.abs() + (ramp * far if context.u < 1e-12 else 0.0)
    return total(moved, ramp * far)


def _ramp(context: RuleContext, v: Tensor, dim: int) -> Tensor:
    """gamma_0, gamma_1, ..., gamma_i = i u / (1 - i u), along dim; inf where i u >= 1."""
    steps = torch.arange(v.shape[dim], dtype=torch.float64, device=v.device) * context.u
    ramp = torch.where(steps < 1, steps / (1 - steps), torch.inf)
    return ramp.view([-1 if i == dim % v.dim() else 1 for i in range(v.dim())])


def _norm(
    context: RuleContext,
    y: Tensor,
    x: Tensor,
    ord: float = 2,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Error:
    """| ||x + d|| - ||x|| | <= ||e|| for |d| <= e; the sum of n squares adds gamma_(n+1)."""
    v, e = context(x)
    norm = lambda t: torch.linalg.vector_norm(t, ord, dim, keepdim)  # noqa: E731
    moved = 0.0 if exact(e) else norm(e + 0 * v)
    if ord in (float("inf"), float("-inf"), 0):
        return moved if ord == float("inf") else float("inf")
    return total(moved, context.gamma(_count(x, y) + 1) * norm(v.abs() + e), context.rounding(y, 4))


def _extremum(name: str) -> Rule:
    """Error rule of amax or amin: every legal result lies between those for x - e and x + e."""

    def rule(
        context: RuleContext,
        y: Tensor | tuple[Tensor, Tensor],
        x: Tensor,
        dim: Dim | Tensor = None,
        keepdim: bool = False,
    ) -> Errors:
        if isinstance(dim, Tensor):
            from .elementwise import RULES

            return RULES["maximum" if name == "amax" else "minimum"](context, y, x, dim)
        values = y[0] if isinstance(y, tuple | list) else y
        v, e = context(x)
        if exact(e):
            return (0.0, 0.0) if isinstance(y, tuple | list) else 0.0
        e = e + 0 * v
        f = getattr(torch, name)
        ends = [_reduce(f, v + s * e, dim, keepdim) for s in (1, -1)]
        out = torch.maximum((ends[0] - values).abs(), (values - ends[1]).abs())
        if not isinstance(y, tuple | list):
            return out
        index = (
            _unsure_choice(v, values, e.amax(cast(int, dim), keepdim=True), cast(int, dim))
            if v.dim() and v.numel()
            else 0.0
        )
        return out, index

    return rule


def _select(takes_k: bool) -> Rule:
    """Rule of topk, sort, kthvalue and median: no order statistic moves by more than the largest error along the axis.

    The error of an index is 1 where another element lies within the errors of the chosen one.
    """

    def rule(
        context: RuleContext, y: Tensor | tuple[Tensor, Tensor], x: Tensor, *args: object, **kwargs: int
    ) -> Errors:
        v, e = context(x)
        if isinstance(y, Tensor):  # the median of all elements
            return 0.0 if exact(e) or not v.numel() else (e + 0 * v).amax()
        if exact(e) or not v.dim() or not v.numel():
            return e, 0.0
        dim = _dim_of(takes_k, args, kwargs)
        worst = (e + 0 * v).amax(dim, keepdim=True)
        keep = worst.dim() == y[0].dim()
        error = worst.expand_as(y[0]) if keep else worst.squeeze(dim)
        return error, _unsure_choice(v, y[0], worst, dim)

    return rule


def _unsure_choice(v: Tensor, values: Tensor, worst: Tensor, dim: int) -> Error:
    """1 where an element of another value lies within twice the largest error of a chosen one, else 0."""
    keep = values.dim() == v.dim()
    chosen = values if keep else values.unsqueeze(dim)
    ordered = torch.nan_to_num(v).sort(dim).values.movedim(dim, -1).contiguous()
    at, reach = torch.nan_to_num(chosen).movedim(dim, -1).contiguous(), 2 * worst.movedim(dim, -1)
    last = ordered.shape[-1] - 1
    above = torch.searchsorted(ordered, at, right=True)
    below = torch.searchsorted(ordered, at) - 1
    near = (above <= last) & (ordered.gather(-1, above.clamp(max=last)) - at <= reach)
    near |= (below >= 0) & (at - ordered.gather(-1, below.clamp(min=0)) <= reach)
    near = near.to(torch.float64).movedim(-1, dim)
    return (near if keep else near.squeeze(dim)) if bool(near.any()) else 0.0


def _dim_of(takes_k: bool, args: Sequence[object], kwargs: Mapping[str, int]) -> int:
    """The dim argument of sort(x, dim), median(x, dim), topk(x, k, dim) or kthvalue(x, k, dim); default -1."""
    if "dim" in kwargs:
        return kwargs["dim"]
    ints = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    return (ints[1] if len(ints) > 1 else -1) if takes_k else ints[0] if ints else -1


# softmax family


def _shifted(context: RuleContext, v: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(max, x - max, relative rounding error of exp(x - max)), the last (3 |x - max| + 4) u: subtraction and exp."""
    peak = v.amax(dim, keepdim=True)
    d = torch.where(torch.isfinite(v), v - peak, 0.0)
    return peak, d, (3 * d.abs() + 4) * context.u


def _softmax(context: RuleContext, y: Tensor, x: Tensor, dim: int, *rest: object) -> Error:
    v, e = context(x)
    if v.dim() == 0 or v.numel() == 0:
        return context.rounding(y)
    _, _, relative = _shifted(context, v, dim)
    relative = cast(Tensor, total(relative, e))
    spread = relative + (y * relative).sum(dim, keepdim=True) + (context.gamma(v.shape[dim]) + 4 * context.u)
    return torch.maximum(y * torch.expm1(spread.clamp(max=700.0)), cast(Tensor, context.rounding(y, 1)))


def _lse(context: RuleContext, v: Tensor, e: Error, y: Tensor, p: Tensor, dim: int) -> Tensor:
    """Error of log(sum(exp(x))): relative error of the sum, plus rounding of the logarithm and of the last addition."""
    peak, _, relative = _shifted(context, v, dim)
    inside = (p * total(relative, e)).sum(dim, keepdim=True) + context.gamma(
        v.shape[dim] if isinstance(dim, int) else 1
    )
    return torch.expm1(inside.clamp(max=700.0)) + 4 * context.u * (y - peak).abs() + context.u * (y.abs() + peak.abs())


def _log_softmax(context: RuleContext, y: Tensor, x: Tensor, dim: int, *_: object) -> Error:
    v, e = context(x)
    if v.dim() == 0 or v.numel() == 0:
        return context.rounding(y)
    lse = torch.logsumexp(v, dim, keepdim=True)
    shifted = torch.where(torch.isfinite(v), v, 0.0).abs()
    return total(e, _lse(context, v, e, lse, y.exp(), dim), context.u * shifted, context.rounding(y, 2))


def _logsumexp(context: RuleContext, y: Tensor, x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Error:
    v, e = context(x)
    dims = [dim] if isinstance(dim, int) else list(dim)
    if v.dim() == 0 or v.numel() == 0:
        return total(e, context.rounding(y, 4))
    full = torch.logsumexp(v, dims, keepdim=True)
    p = torch.where(torch.isfinite(v), torch.exp(v - full), 0.0)
    peak = v.amax(dims, keepdim=True)
    d = torch.where(torch.isfinite(v), v - peak, 0.0).abs()
    inside = (p * total((3 * d + 4) * context.u, e)).sum(dims, keepdim=True) + context.gamma(_count(v, full))
    out = (
        torch.expm1(inside.clamp(max=700.0))
        + 4 * context.u * (full - peak).abs()
        + context.u * (full.abs() + peak.abs())
    )
    return out if keepdim else out.reshape(y.shape)


def _softmax_backward(context: RuleContext, y: Tensor, grad: Tensor, p: Tensor, dim: int, *_: object) -> Error:
    """Error of p (g - s), s = sum(g p). A kernel may also compute p g - p s, so both products are rounded.

    In attention g = dy v^T and y = p v, so s = sum(dy y). If y is read back in 16 bits, as in FlashAttention's
    backward, each term is off by u |y|, and s by at most u sum(p |dy| |v|^T).
    """
    (vg, eg), (vp, ep) = context(grad), context(p)
    if vg.dim() == 0 or vg.numel() == 0:
        return total(scaled(vg, ep), context.rounding(y))
    gp = (vg * vp).abs()
    s = (vg * vp).sum(dim, keepdim=True)
    e_gp = total(scaled(vg, ep), scaled(vp, eg), 0.0 if exact(eg) or exact(ep) else eg * ep)
    e_s = cast(Tensor, total(context.gamma(vg.shape[dim]) * total(gp, e_gp), e_gp)).sum(dim, keepdim=True)
    if context.read_back:
        e_s = e_s + context.read_back * (context.size_of(grad) * vp.abs()).sum(dim, keepdim=True)
    outer = vp.abs() * total(eg, e_s) + scaled((vg - s).abs() + e_s, ep)
    return outer + 3 * context.u * (gp + vp.abs() * s.abs())


# products


def bilinear(f: Callable[[Tensor, Tensor], Tensor], context: RuleContext, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Error of a product f(a, b), bilinear in a and b: f(e_a + gamma_n (|a| + e_a), |b|) + f(|a| + e_a, e_b)."""
    (va, ea), (vb, eb) = context(a), context(b)
    va, vb = va.abs(), vb.abs()
    if context.operand_unit:
        ea, eb = total(ea, va * context.operand_unit), total(eb, vb * context.operand_unit)
    out = f(cast(Tensor, total(ea, context.gamma(n) * (va + ea))), vb)
    return out if exact(eb) else out + f(va + ea, eb + 0 * vb)


def _mm(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    return lambda context, y, a, b: bilinear(f, context, a, b, a.shape[-1])


def _addmm(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    def rule(
        context: RuleContext,
        y: Tensor,
        c: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
        **_: object,
    ) -> Error:
        vc, ec = context(c)
        g = context.gamma(a.shape[-1] + 2)
        product = bilinear(f, context, a, b, a.shape[-1] + 2)
        return total(scaled(beta, total(ec, g * (vc.abs() + ec))), scaled(alpha, product), context.rounding(y))

    return rule


def _convolution(
    context: RuleContext,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: int,
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    n = w.numel() // (w.shape[1] if transposed else w.shape[0]) + 1
    rest = (None, stride, padding, dilation, transposed, output_padding, groups)
    out = bilinear(lambda a, b: torch.ops.aten.convolution(a, b, *rest), context, x, w, n)
    if bias is None:
        return out
    vb, eb = context(bias)
    shape = (-1, *(1,) * (y.dim() - 2))
    return out + cast(Tensor, total(eb, context.gamma(n) * vb.abs())).view(shape)


def _convolution_backward(
    context: RuleContext,
    y: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    _: object,
    stride: Sequence[int],
    padding: int,
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Errors:
    """Errors of the gradients of x, w (a product each) and the bias (a sum); 0 where `mask` asks for none."""
    rest = (None, stride, padding, dilation, transposed, output_padding, groups)
    call = torch.ops.aten.convolution_backward
    outputs = grad.numel() // max(grad.shape[1], 1)
    ex: Error
    ew: Error
    eb: Error
    ex = ew = eb = 0.0
    if mask[0]:
        n = w.numel() // (w.shape[0] if transposed else w.shape[1])
        ex = bilinear(lambda g, v: call(g, x.double(), v, *rest, [True, False, False])[0], context, grad, w, n)
    if mask[1]:
        ew = bilinear(lambda g, v: call(g, v, w.double(), *rest, [False, True, False])[1], context, grad, x, outputs)
    if mask[2]:
        eb = _sum(context, y[2], grad, [d for d in range(grad.dim()) if d != 1])
    return ex, ew, eb


RULES: dict[str, Rule] = {
    "sum": _sum, "mean": _mean, "prod": _prod, "cumsum": _cumulative, "cumprod": _cumprod,
    "linalg_vector_norm": _norm, "amax": _extremum("amax"), "amin": _extremum("amin"),
    "max": _extremum("amax"), "min": _extremum("amin"),
    "topk": _select(True), "kthvalue": _select(True), "sort": _select(False), "median": _select(False),
    "_softmax": _softmax, "_log_softmax": _log_softmax, "logsumexp": _logsumexp,
    "_softmax_backward_data": _softmax_backward,
    "mm": _mm(torch.mm), "bmm": _mm(torch.bmm), "mv": _mm(torch.mv), "dot": _mm(torch.dot), "vdot": _mm(torch.dot),
    "addmm": _addmm(torch.mm), "addmv": _addmm(torch.mv), "baddbmm": _addmm(torch.bmm),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}  # fmt: skip


def _product_size(context: RuleContext, a: Tensor, b: Tensor) -> Tensor:
    """|a| @ |b|; numbers below the smallest normal one count as that one, because they round as it does."""
    return a.abs() @ b.abs() + context.least_back * a.abs().sum(-1, keepdim=True)


# sums of |a_i b_i|, for backwards that read a product back (see _softmax_backward)
SIZES: dict[str, Callable[..., Tensor]] = {
    "mm": _product_size,
    "bmm": _product_size,
    "mul": lambda context, a, b: cast(Tensor, _size_or_number(context, a) * _size_or_number(context, b)),
}


def _size_or_number(context: RuleContext, x: Operand) -> Operand:
    return context.size_of(x) if isinstance(x, Tensor) else abs(x)


def _terms_with(context: RuleContext, a: Operand, b: Operand, *_: object) -> int:
    """Number of terms of a + b if one of them is a sum, counting the other as one term; 0 if neither is a sum."""
    n = max(context.terms_of(a), context.terms_of(b))
    return n + 1 if n else 0


# number of terms of a result that is a sum, including an operand added to it: an accumulator may start from it
TERMS: dict[str, Callable[..., int]] = {
    "sum": lambda _, x, dim=None, *rest: _terms(x, dim),
    "mm": lambda _, a, b: a.shape[1], "bmm": lambda _, a, b: a.shape[2], "mv": lambda _, a, b: a.shape[1],
    "dot": lambda _, a, b: a.shape[0], "addmm": lambda _, c, a, b: a.shape[1], "baddbmm": lambda _, c, a, b: a.shape[2],
    "convolution": lambda _, x, w, *rest: w.numel() // max(w.shape[0], 1),
    "add": _terms_with, "sub": _terms_with,
}  # fmt: skip


def _terms(x: Tensor, dim: Dim) -> int:
    axes = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return math.prod(x.shape[d] for d in axes)
