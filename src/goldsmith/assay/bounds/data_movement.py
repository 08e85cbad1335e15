"""Rules for copies, indexing and scatters, which move errors with their elements; lists of operators without a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .elementwise import compare, exact, total
from .rule_context import Error, Operand, Rule, RuleContext

aten = torch.ops.aten

# Views that need no rule: they share a storage, so they also share its errors (its twin, see running_errors).
# These are the in-place ones, and those that the schema does not declare as views.
VIEWS = {
    "_unsafe_view", "lift_fresh", "_reshape_alias", "reshape", "squeeze_", "unsqueeze_", "t_", "transpose_",
    "swapaxes_", "swapdims_", "as_strided_", "detach_",
}  # fmt: skip
# Results without error: new memory, zeros, ones, random numbers (taken as they are), decisions (compared separately).
EXACT = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros",
    "zero", "ones", "ones_like", "new_ones", "rand", "randn", "rand_like", "randn_like", "randint", "randperm",
    "bernoulli", "normal", "uniform", "argmax", "argmin", "argsort", "nonzero", "isnan", "isinf", "isfinite",
    "bincount", "resize",
}  # fmt: skip
# Constants: their error is set at the first read, from how well the compute precision represents them.
CONSTANTS = {"full", "full_like", "new_full", "scalar_tensor", "arange", "eye", "tril_indices", "triu_indices"}


def _error_of(context: RuleContext, x: Tensor) -> Tensor:
    e = context.error_of(x)
    return e if isinstance(e, Tensor) else torch.full(x.shape, e, dtype=torch.float64, device=x.device)


def _index_is_rounded(context: RuleContext, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether an index was computed from rounded numbers, so that a legal kernel may use another one."""
    for a in (*args, *kwargs.values()):
        for t in a if isinstance(a, list | tuple) else (a,):
            if isinstance(t, Tensor) and not t.is_floating_point() and not exact(context.error_of(t)):
                return True
    return False


def moves(name: str) -> Rule:
    """Rule for an operator that only moves elements: apply it to their errors. Padding is exact."""
    packet = getattr(aten, name)

    def rule(context: RuleContext, y: Tensor, *args: Any, **kwargs: object) -> Error:
        payload = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        if _index_is_rounded(context, args[1:], kwargs):
            return float("inf")
        if all(exact(context.error_of(t)) for t in payload):
            return 0.0
        errors = [_error_of(context, t) for t in payload]
        kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")}
        return packet(errors if isinstance(args[0], list | tuple) else errors[0], *args[1:], **kwargs)

    return rule


def _pad(context: RuleContext, y: Tensor, x: Tensor, pad: Sequence[int], value: float = 0) -> Error:
    return 0.0 if exact(context.error_of(x)) else aten.constant_pad_nd(_error_of(context, x), pad, 0)


def _cast(context: RuleContext, y: Tensor, x: Tensor, *_: object, **__: object) -> Error:
    """Rule for casts. To float64 or the same dtype: the error of x. To integers: how far truncation can move the value.

    To a narrower float (inside storage(...)): the error of x and one ulp, if x is not exact.
    """
    v, e = context(x)
    if y.dtype in (torch.float64, x.dtype) or y.dtype == torch.bool == x.dtype:
        return e if x.is_floating_point() or x.dtype == torch.bool or not exact(e) else _representation(context, y)
    if y.dtype == torch.bool:
        return compare(context, y, x, 0)
    if exact(e):
        return 0.0
    if not y.is_floating_point():
        whole = torch.trunc(v)
        return torch.maximum((torch.trunc(v + e) - whole).abs(), (whole - torch.trunc(v - e)).abs())
    return e + torch.finfo(y.dtype).eps * v.abs() + torch.finfo(y.dtype).smallest_normal


def _representation(context: RuleContext, y: Tensor) -> Error:
    """Rounding of integers that exceed the significand of the compute precision when they become floats."""
    gap = (y.to(context.compute).to(y.dtype) - y).abs()
    return gap if bool(gap.any()) else 0.0


def _copy(context: RuleContext, y: Tensor, _: object, source: Tensor, *__: object) -> Error:
    return _cast(context, y, source)


def _fill(context: RuleContext, y: Tensor, _: object, value: float) -> Error:
    return context(value)[1]


def _linspace(context: RuleContext, y: Tensor, start: float, end: float, *_: object, **__: object) -> Error:
    """start + i step, computed in the compute precision"""
    return 4 * context.u * max(abs(float(start)), abs(float(end)))


def _embedding(context: RuleContext, y: Tensor, weight: Tensor, index: Tensor, *_: object) -> Error:
    """Rule for embedding: the errors of the rows that are read."""
    return float("inf") if _index_is_rounded(context, (index,), {}) else _indexed(context, weight, index)


def _indexed(context: RuleContext, weight: Tensor, index: Tensor) -> Error:
    return 0.0 if exact(context.error_of(weight)) else _error_of(context, weight)[index]


# writing and accumulating at indices


def _written(
    context: RuleContext,
    base: Tensor,
    source: Operand,
    write: Callable[[Tensor, Error], Tensor],
    index: Tensor | Sequence[Tensor],
) -> Error:
    """Rule for writes: the errors of the written elements replace the old ones."""
    if _index_is_rounded(context, (index,) if isinstance(index, Tensor) else (tuple(index),), {}):
        return float("inf")
    es = context(source)[1]
    if exact(context.error_of(base)) and exact(es):
        return 0.0
    errors = _error_of(context, source) if isinstance(source, Tensor) else es
    return write(_error_of(context, base), errors)


def _accumulated(
    context: RuleContext,
    base: Tensor,
    source: Operand,
    add: Callable[[Tensor, Tensor], Tensor],
    index: Tensor | Sequence[Tensor],
) -> Error:
    """gamma_k (|base| + sum |added|) for k additions, counted per element; adding to an exact 0 does not round."""
    if _index_is_rounded(context, (index,) if isinstance(index, Tensor) else (tuple(index),), {}):
        return float("inf")
    vb, eb = context(base)
    vs, es = context(source)
    vs = vs if isinstance(vs, Tensor) else torch.full((), float(vs), dtype=torch.float64, device=base.device)
    source = torch.as_tensor(vs).to(torch.float64)
    zero = torch.zeros_like(vb)
    terms = add((vb.abs() + eb > 0).to(torch.float64), torch.ones_like(source))
    gamma = (terms - 1).clamp(min=0) * context.u
    gamma = torch.where(gamma < 1, gamma / (1 - gamma), torch.inf)
    carried = 0.0 if exact(eb) and exact(es) else add(zero + eb, torch.zeros_like(source) + es)
    return total(carried, gamma * add(vb.abs() + eb, source.abs() + es))


def _index_put(
    context: RuleContext,
    y: Tensor,
    base: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *_: object,
) -> Error:
    put = lambda b, s: aten.index_put(b, indices, torch.as_tensor(s, dtype=b.dtype), accumulate)  # noqa: E731
    known = tuple(i for i in indices if i is not None)
    return (_accumulated if accumulate else _written)(context, base, values, put, known)


def _index_add(
    context: RuleContext, y: Tensor, base: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Error:
    scaled = abs(alpha)
    return _accumulated(context, base, source, lambda b, s: b.index_add(dim, index, s * scaled), index)


def _scatter_add(context: RuleContext, y: Tensor, base: Tensor, dim: int, index: Tensor, source: Tensor) -> Error:
    return _accumulated(context, base, source, lambda b, s: b.scatter_add(dim, index, s), index)


def _scatter(
    context: RuleContext,
    y: Tensor,
    base: Tensor,
    dim: int,
    index: Tensor,
    source: Operand,
    *,
    reduce: str | None = None,
) -> Error:
    if reduce is not None:
        return float("inf")
    return _written(context, base, source, lambda b, s: b.scatter(dim, index, s), index)


def _scatter_reduce(
    context: RuleContext,
    y: Tensor,
    base: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str | None,
    *,
    include_self: bool = True,
) -> Error:
    if reduce != "sum" or not include_self:
        return float("inf")
    return _scatter_add(context, y, base, dim, index, source)


def _index_copy(context: RuleContext, y: Tensor, base: Tensor, dim: int, index: Tensor, source: Tensor) -> Error:
    return _written(context, base, source, lambda b, s: b.index_copy(dim, index, cast(Tensor, s)), index)


def _index_fill(context: RuleContext, y: Tensor, base: Tensor, dim: int, index: Tensor, value: float) -> Error:
    e = context(value)[1]
    return _written(context, base, value, lambda b, _: b.index_fill(dim, index, float(e)), index)


def _embedding_backward(
    context: RuleContext,
    y: Tensor,
    grad: Tensor,
    index: Tensor,
    rows: int,
    padding: int = -1,
    scale_by_freq: bool = False,
) -> Error:
    if scale_by_freq:
        return float("inf")
    kept = index.reshape(-1) != padding
    flat = lambda t: t.reshape(-1, t.shape[-1])[kept]  # noqa: E731
    base = torch.zeros(rows, grad.shape[-1], dtype=torch.float64, device=grad.device)
    v, e = context(grad)
    index = index.reshape(-1)[kept]
    add = lambda t: base.index_add(0, index, flat(t))  # noqa: E731
    terms = torch.zeros(rows, 1, dtype=torch.float64, device=grad.device)
    terms = terms.index_add(0, index, torch.ones(index.numel(), 1, dtype=torch.float64, device=grad.device))
    gamma = (terms - 1).clamp(min=0) * context.u
    return total(add(e) if isinstance(e, Tensor) else e, gamma / (1 - gamma).clamp(min=1e-3) * add(v.abs() + e))


def _overlapping(name: str) -> Rule:
    """Backward of overlapping windows (unfold): moves elements, and sums those that land on the same place."""
    packet = getattr(aten, name)

    def rule(context: RuleContext, y: Tensor, x: Tensor, *args: object) -> Error:
        v, e = context(x)
        count = packet(torch.ones_like(v), *args)
        gamma = (count - 1).clamp(min=0) * context.u
        carried = 0.0 if exact(e) else packet(_error_of(context, x), *args)
        return total(carried, gamma / (1 - gamma) * packet(v.abs() + e, *args))

    return rule


def _pooled(name: str) -> Rule:
    """Rule for averages over windows and their backward.

    All weights have one sign. An element has at most n terms: the largest window, or the ratio of the sizes of x and y.
    """
    packet = getattr(aten, name)

    def rule(context: RuleContext, y: Tensor, x: Tensor, *args: object) -> Error:
        v, e = context(x)
        windows = [
            math.prod(a) for a in args if isinstance(a, list | tuple) and a and all(isinstance(i, int) for i in a)
        ]
        ratio = max(y.numel(), x.numel()) // max(min(y.numel(), x.numel()), 1)
        n = max([ratio, *(w for w in windows if w <= max(x.numel(), y.numel()))]) + 2
        others = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        carried = 0.0 if exact(e) else packet(_error_of(context, x), *others)
        return total(carried, context.gamma(n) * packet(v.abs() + e, *others), context.rounding(y, 4))

    return rule


_POOLS = (
    "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
)  # fmt: skip
_MOVES = (
    "clone", "contiguous", "cat", "stack", "index_select", "gather", "take", "masked_select", "flip", "roll", "repeat",
    "tril", "triu", "select_backward", "slice_backward", "diagonal_backward", "diag_embed", "index", "_unsafe_index",
    "repeat_interleave", "rot90", "diag", "block_diag", "permute_copy", "expand_copy", "view_copy", "pixel_shuffle",
    "trace_backward", "lift", "pixel_unshuffle", "masked_scatter_backward",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{name: moves(name) for name in _MOVES if hasattr(aten, name)},
    **{name: _pooled(name) for name in _POOLS},
    "constant_pad_nd": _pad, "_to_copy": _cast, "copy": _copy, "fill": _fill, "linspace": _linspace,
    "embedding": _embedding,
    "index_put": _index_put, "_index_put_impl": _index_put, "_unsafe_index_put": _index_put, "index_add": _index_add,
    "scatter_add": _scatter_add, "scatter": _scatter, "scatter_reduce": _scatter_reduce, "index_copy": _index_copy,
    "index_fill": _index_fill, "embedding_dense_backward": _embedding_backward,
    "unfold_backward": _overlapping("unfold_backward"),
    "slice_scatter": lambda context, y, b, s, *a, **k: _written(
        context, b, s, lambda p, q: aten.slice_scatter(p, q, *a, **k), ()
    ),
    "select_scatter": lambda context, y, b, s, *a: _written(
        context, b, s, lambda p, q: aten.select_scatter(p, q, *a), ()
    ),
    "diagonal_scatter": lambda context, y, b, s, *a: _written(
        context, b, s, lambda p, q: aten.diagonal_scatter(p, q, *a), ()
    ),
    "masked_scatter": lambda context, y, b, k, s: _written(context, b, s, lambda p, q: aten.masked_scatter(p, k, q), k),
    "any": lambda context, y, x, *a: 0.0 if exact(context.error_of(x)) else float(bool(context.error_of(x).any())),
    "all": lambda context, y, x, *a: 0.0 if exact(context.error_of(x)) else float(bool(context.error_of(x).any())),
}  # fmt: skip
