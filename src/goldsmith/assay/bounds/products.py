"""Error bounds of matrix products, convolutions and triangular solves; sizes and numbers of terms of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from .elementwise import exact, scaled, total
from .rule_context import Dim, Error, Errors, Operand, Rule, RuleContext
from .sums import sum_error


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
        eb = sum_error(context, y[2], grad, [d for d in range(grad.dim()) if d != 1])
    return ex, ew, eb


def _solve_triangular(
    context: RuleContext,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Tensor:
    """Error d of y with a y = b: (M - D) d = e_b + D |y|, D = e_a + gamma_n (|a| + e_a).

    Substitution in any order solves a system within gamma_n |a| of its own (Higham, theorem 8.5). M has the diagonal of
    |a| and the rest of -|a|, so the inverse of M - D, where its diagonal is positive, is at least that of any system
    within D of a. Without left, y a = b.
    """
    if not left:
        return _solve_triangular(context, y.mT, a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    (va, ea), (_, eb) = context(a), context(b)
    part = torch.triu if upper else torch.tril
    eye = torch.eye(a.shape[-1], dtype=torch.float64, device=a.device)
    kept = eye if unitriangular else 0.0
    size, own = (part(t) * (1 - kept) for t in (va.abs(), ea + 0 * va))
    size = size + kept
    moved = own + context.gamma(a.shape[-1]) * (size + own)
    least = 2 * eye * size - size - moved
    singular = (least.diagonal(dim1=-2, dim2=-1) <= 0).any(-1)[..., None, None]
    error = torch.linalg.solve_triangular(torch.where(singular, eye, least), eb + moved @ y.abs(), upper=upper)
    return torch.where(singular, torch.inf, error)


RULES: dict[str, Rule] = {
    "linalg_solve_triangular": _solve_triangular,
    "mm": _mm(torch.mm), "bmm": _mm(torch.bmm), "mv": _mm(torch.mv), "dot": _mm(torch.dot), "vdot": _mm(torch.dot),
    "addmm": _addmm(torch.mm), "addmv": _addmm(torch.mv), "baddbmm": _addmm(torch.bmm),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}  # fmt: skip


def _product_size(context: RuleContext, a: Tensor, b: Tensor) -> Tensor:
    """|a| @ |b|; numbers below the smallest normal one count as that one, because they round as it does."""
    return a.abs() @ b.abs() + context.least_back * a.abs().sum(-1, keepdim=True)


# sums of |a_i b_i|, for backwards that read a product back (see softmax.py)
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
