"""e = sum_i e_i + gamma_n sum_i |a_i b_i|: error bounds of sums, products of elements, norms and choices.

They hold for any order of the additions. n terms get gamma_n, not gamma_(n-1), because a dot also rounds n products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .elementwise import exact, total
from .rule_context import Dim, Error, Errors, Rule, RuleContext


def element_count(x: Tensor, y: Tensor) -> int:
    return x.numel() // max(y.numel(), 1)


def sum_error(
    context: RuleContext,
    y: Tensor,
    x: Tensor,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Error:
    v, e = context(x)
    n = element_count(x, y)
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
    n = element_count(x, y)
    return total(sum_error(context, y, x, dim, keepdim) / max(n, 1), context.rounding(y, 4))


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
        moved = moved + element_count(x, y) * context.u * far
    if element_count(x, y) <= 1:
        return _reduce(torch.sum, e + 0 * v, dim, keepdim)
    return total(moved, context.gamma(element_count(x, y)) * far)


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
    return total(moved, context.gamma(element_count(x, y) + 1) * norm(v.abs() + e), context.rounding(y, 4))


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
    at = torch.nan_to_num(chosen).movedim(dim, -1).contiguous()
    reach = 2 * torch.where(torch.isnan(worst), torch.inf, worst).movedim(dim, -1)
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


RULES: dict[str, Rule] = {
    "sum": sum_error, "mean": _mean, "prod": _prod, "cumsum": _cumulative, "cumprod": _cumprod,
    "linalg_vector_norm": _norm, "amax": _extremum("amax"), "amin": _extremum("amin"),
    "max": _extremum("amax"), "min": _extremum("amin"),
    "topk": _select(True), "kthvalue": _select(True), "sort": _select(False), "median": _select(False),
}  # fmt: skip
