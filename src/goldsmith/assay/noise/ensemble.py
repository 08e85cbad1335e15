"""y_k = round(golden in compute precision, every sum in its own legal order): the noise of honest implementations.

A member of the ensemble is one run under a dispatch mode that rewrites reductions, matrix products, convolutions and
accumulating scatters. Three of eight members add one term after another (as stored, or permuted), because no legal
order is noisier: for n terms of random sign a sequential sum errs by about n/sqrt(2) u, tiles of t by sqrt(n t) u,
pairwise by sqrt(n log n) u. Without them a plain loop over n = 16384 would be six times noisier than every member.
Two of eight members add one half of a result's elements in another order than the other half: a kernel may do so, and
equal rows that cancel to the last bit would otherwise have no noise at all.
Functions have legal variants too: exp as 2^(x log2 e), a / b as a (1 / b), and formulas for the sigmoid, 1 / sqrt, erf
and the gradient of a softmax.
Sums that differ in their last bits round to 16 bits almost alike, so the members are one sample of that rounding, not
eight. A candidate that rounds three elements of a short sum the other way would be far from all of them. Therefore
every second member rounds numbers near the midpoint at random (`DITHER`). On experts.moe with bfloat16 products this
ends false alarms of up to 20 times the noise, and still catches every fault caught before.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from ...core.tracing import is_deciding
from ..bounds.bounded import smallest_subnormal, unit_roundoff
from ..bounds.composed_operators import REDUCTIONS, softmax_backward
from ..bounds.rule_context import Dim
from ..bounds.rule_lookup import treatment_of
from ..support.dispatch_mode import DispatchMode
from ..support.torch_settings import default_dtype, in_one_order, threads_for
from . import convolution_orders
from . import summation_orders as orders

# tiles: sums of 16..256 permuted terms, added up; mixed: a random one of the first four for every reduction
STYLES = ("as_stored", "permuted", "tiles", "pairwise", "mixed", "permuted", "tiles", "pairwise")
APART = (5, 6)  # members in which elements of one result are added in two orders
DITHER = 0.49  # of the smallest step that rounding takes


def legal_runs(
    fn: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    leaves: Mapping[str, Tensor],
    *,
    compute: torch.dtype,
    stores: Mapping[str, torch.dtype],
    k: int = 8,
    seed: int = 0,
    dot: str = "ieee",
    nudged: bool = False,
    read_back: torch.dtype | None = None,
    lacks: Callable[[float], bool] | None = None,
) -> list[dict[str, Tensor]]:
    """k runs of `fn` in `compute` precision, each with every reduction in its own random legal order.

    leaves: float64 tensors, which are cast to `compute`; integer and bool tensors are passed unchanged.
    fn(leaves) -> {name: tensor}: outputs, stages, saved results and gradients; it may call torch.autograd.grad.
    stores: name -> dtype in which the candidate stores that result (default: `compute`).
    read_back: dtype of rounded outputs that a backward may read again (`_softmax_backward`).
    nudged: every run moves the leaves up or down by one rounding at random, as a backward stable formula may.
    lacks(seconds): whether too little time is left for one more run; then the result is an empty list.
    Returns k dicts; every tensor is rounded once to its store dtype, detached, on the leaves' device.
    """
    runs, slowest = [], 0.0
    for member in range(k):
        narrowed = {
            name: t.detach().to(compute) if t.dtype == torch.float64 else t.clone() for name, t in leaves.items()
        }
        if compute == torch.float64:
            narrowed = {name: t.clone() for name, t in narrowed.items()}
        if nudged:
            narrowed = {name: _nudged(t, compute, seed * 1009 + member) for name, t in narrowed.items()}
        if lacks is not None and lacks(slowest):
            return []
        began = time.perf_counter()
        style = STYLES[member % len(STYLES)]
        mode = LegalOrder(
            style,
            compute,
            dot,
            seed * 1009 + member,
            list(narrowed.values()),
            member % 2 == 1,
            read_back,
            member % len(STYLES) in APART,
        )
        with default_dtype(compute), threads_for(leaves), in_one_order(leaves), mode:
            results = fn(narrowed)
        runs.append({name: mode.as_stored(t.detach(), stores.get(name, compute)) for name, t in results.items()})
        slowest = max(slowest, time.perf_counter() - began)
    return runs


def _place(t: Tensor) -> tuple:
    """Key of a view of some memory, valid until the memory is written."""
    version = 0 if t.is_inference() else t._version
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), version


def _nudged(t: Tensor, compute: torch.dtype, seed: int) -> Tensor:
    """t (1 + s 2u), s = 1 or -1 at random"""
    if not t.is_floating_point():
        return t
    return t + t * _signs(t, seed % 2**63) * torch.finfo(compute).eps


def _signs(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randint(0, 2, like.shape, generator=generator, device=like.device).to(like.dtype) * 2 - 1


class LegalOrder(DispatchMode):
    """Dispatch mode: every operator in `compute` precision, every sum in one style of legal order."""

    def __init__(
        self, style: str, compute: torch.dtype, dot: str, seed: int, leaves: list[Tensor], dithers: bool = False,
        read_back: torch.dtype | None = None, apart: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.apart = apart
        self.style, self.compute, self.dot, self.dithers = style, compute, dot, dithers
        self.read_back = read_back or compute
        self.random = random.Random(seed)
        self.truncates = self.random.random() < 0.5  # tensor cores drop tf32's bits, conversions round them
        self.exp_as_exp2, self.divides_by_reciprocal = (self.random.random() < 0.5 for _ in range(2))
        self.by_formula = self.random.random() < 0.5
        self._leaf_storages = {t.untyped_storage()._cdata for t in leaves}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._nearest: dict[tuple, tuple[Tensor, Tensor]] = {}  # view -> (dithered tensor, the same rounded to nearest)

    def order(self) -> orders.Order:
        """A fresh legal order for one reduction."""
        style = self.style if self.style != "mixed" else self.random.choice(STYLES[:4])
        order = orders.Order(style, self.random.randrange(2**31), 2 ** self.random.randint(4, 8))
        return replace(order, apart=self.random.randrange(2**31)) if self.apart else order

    def on_store(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds the memory of `value` without autograd: later readers, backward included, see the stored value."""
        if not (value.is_floating_point() and dtype.is_floating_point):
            return value
        if value.untyped_storage()._cdata in self._leaf_storages:
            return value  # an input, which is already rounded
        if _place(value) in self._nearest:
            return value
        with _disable_current_modes():  # operators here are not the golden's
            return self._rounded(value, dtype)

    def _rounded(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        data = value.data
        overlaps = any(stride == 0 and size > 1 for stride, size in zip(data.stride(), data.shape, strict=True))
        if overlaps:
            data = data.as_strided((data.untyped_storage().nbytes() // data.element_size(),), (1,), 0)
        rounded = data.to(dtype)
        if self.dithers and torch.finfo(dtype).eps > torch.finfo(value.dtype).eps:
            shown = rounded.as_strided(value.shape, value.stride(), value.storage_offset()) if overlaps else rounded
            self._nearest[_place(value)] = value.data, shown  # holding value.data keeps its memory from being reused
            rounded = self._dithered(data, dtype)
        data.copy_(rounded)
        return value

    def _dithered(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """data plus a random step, rounded to `dtype`: representable numbers stay, those near a midpoint go either way.

        The step is below half of the smallest step of that rounding.
        """
        generator = self._generators.get(data.device)
        if generator is None:
            seed = self.random.randrange(2**31)
            generator = self._generators[data.device] = torch.Generator(data.device).manual_seed(seed)
        steps = torch.rand(data.shape, dtype=data.dtype, device=data.device, generator=generator) * 2 - 1
        unit = (unit_roundoff(dtype) * data.abs()).clamp(min=smallest_subnormal(dtype) / 2)
        return (data + DITHER * steps * unit.nan_to_num(0.0, 0.0, 0.0)).to(dtype)

    def as_stored(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """A result rounded to nearest, even if later operators of this run read it dithered."""
        if not t.is_floating_point():
            return t
        _, rounded = self._nearest.get(_place(t), (t, t))
        return rounded.to(dtype)

    def operand(self, x: Tensor) -> Tensor:
        """A factor of a matrix product; if the target declares "tf32", rounded or truncated to its 11 bits."""
        if self.dot != "tf32" or x.dtype != torch.float32:
            return x
        bits = x.contiguous().view(torch.int32)
        return ((bits if self.truncates else bits + 0x1000) & ~0x1FFF).view(torch.float32)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if is_deciding():
            return func(*args, **kwargs)
        if self.compute != torch.float64:
            args, kwargs = self._narrow(args), {name: self._narrow(v) for name, v in kwargs.items()}
        treatment = treatment_of(func)
        if treatment.view:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        rewrite = _REWRITES.get(name)
        if rewrite is not None:
            rewritten = rewrite(self, *args, **kwargs)
            return func(*args, **kwargs) if rewritten is None else rewritten
        composed = REDUCTIONS.get(name) or treatment.composed
        if composed is not None:
            with self:
                y = composed(*args, **kwargs)
                if y is not NotImplemented:
                    return args[0].copy_(y) if treatment.inplace else y
        return func(*args, **kwargs)

    def _narrow(self, a: object) -> Any:
        if isinstance(a, Tensor):
            return a.to(self.compute) if a.dtype == torch.float64 else a
        if type(a) is list or type(a) is tuple:
            return type(a)([self._narrow(b) for b in a])
        return self.compute if a is torch.float64 else a


# rewrites: rewrite(mode, *args, **kwargs) -> result, or None for the operator itself


def _sum(
    m: LegalOrder, x: Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    if not x.is_floating_point() or x.dim() == 0:
        return None
    return orders.reduce(x, dim, keepdim, m.order())


def _mean(
    m: LegalOrder, x: Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    total = _sum(m, x, dim, keepdim)
    if total is None:
        return None
    n = x.numel() // max(total.numel(), 1)
    return total / n if n else total * math.nan


def _prod(
    m: LegalOrder, x: Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    if not x.is_floating_point() or x.dim() == 0:
        return None
    return orders.reduce(x, dim, keepdim, m.order(), product=True)


def _cumsum(m: LegalOrder, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor | None:
    return orders.scan(x, dim, m.order()) if x.is_floating_point() and x.dim() else None


def _product(m: LegalOrder, a: Tensor, b: Tensor) -> Tensor | None:
    """mm and bmm"""
    return orders.matmul(m.operand(a), m.operand(b), m.order()) if a.is_floating_point() else None


def _mv(m: LegalOrder, a: Tensor, b: Tensor) -> Tensor | None:
    return None if not a.is_floating_point() else cast(Tensor, _product(m, a, b.unsqueeze(-1))).squeeze(-1)


def _dot(m: LegalOrder, a: Tensor, b: Tensor) -> Tensor | None:
    return None if not a.is_floating_point() else cast(Tensor, _product(m, a.unsqueeze(0), b.unsqueeze(-1))).reshape(())


def _addmm(
    m: LegalOrder, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, **_: object
) -> Tensor | None:
    ab = _product(m, a, b) if b.dim() > 1 else _mv(m, a, b)
    return None if ab is None else (c if beta == 1 else c * beta) + (ab if alpha == 1 else ab * alpha)


def _index_add(
    m: LegalOrder, base: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor | None:
    if index.dim() == 0:
        return None
    p = orders.permutation(index.numel(), m.random.randrange(2**31), index.device)
    return base.index_add(dim, index[p], source.index_select(dim, p), alpha=alpha)


def _scatter_add(m: LegalOrder, base: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
    if index.dim() == 0 or index.numel() == 0 or index.shape[dim] == 1:
        return None
    p = orders.permutation(index.shape[dim], m.random.randrange(2**31), index.device)
    rows = source.narrow(dim, 0, index.shape[dim]).index_select(dim, p)
    return base.scatter_add(dim, index.index_select(dim, p), rows)


def _index_put(
    m: LegalOrder, base: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: object
) -> Tensor | None:
    known = [i for i in indices if i is not None]
    same = len(known) == len(indices) and all(i.shape == known[0].shape and i.dtype != torch.bool for i in known)
    if not (accumulate and same and known[0].dim() and values.dim() and values.shape[0] == known[0].shape[0]):
        return None
    p = orders.permutation(values.shape[0], m.random.randrange(2**31), values.device)
    return torch.ops.aten.index_put(base, [i[p] for i in known], values[p], True)


def _exp(m: LegalOrder, x: Tensor) -> Tensor | None:
    return torch.exp2(x * math.log2(math.e)) if m.exp_as_exp2 and x.is_floating_point() else None


def _div(m: LegalOrder, a: Tensor, b: Tensor | float, *, rounding_mode: str | None = None) -> Tensor | None:
    if not (m.divides_by_reciprocal and isinstance(b, Tensor) and b.is_floating_point()) or rounding_mode:
        return None
    # 1 / b may overflow or underflow where a / b does not: divide those elements
    r = 1 / b
    return torch.where(torch.isfinite(r) & (r.abs() > torch.finfo(r.dtype).tiny), a * r, a / b)


def _sigmoid(m: LegalOrder, x: Tensor) -> Tensor | None:
    return 1 / (1 + torch.exp(-x)) if m.by_formula and x.is_floating_point() else None


def _tanh(m: LegalOrder, x: Tensor) -> Tensor | None:
    """2 sigmoid(2 x) - 1, as Triton kernels write it"""
    return 2 / (1 + torch.exp(-2 * x)) - 1 if m.by_formula and x.dtype == torch.float32 else None


def _erf(m: LegalOrder, x: Tensor) -> Tensor | None:
    """sign(x) (1 - P(t) exp(-x^2)), t = 1 / (1 + p |x|): Abramowitz and Stegun, 7.1.26"""
    if not (m.by_formula and x.dtype == torch.float32):
        return None
    t = 1 / (1 + 0.3275911 * x.abs())
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return torch.sign(x) * (1 - polynomial * torch.exp(-x * x))


def _silu(m: LegalOrder, x: Tensor) -> Tensor | None:
    return x * torch.sigmoid(x) if m.by_formula else None


def _rsqrt(m: LegalOrder, x: Tensor) -> Tensor | None:
    return 1 / torch.sqrt(x) if m.by_formula and x.is_floating_point() else None


def _softmax_backward(m: LegalOrder, grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """y (g - s); by formula y g - y s, with an s that is rounded independently of g.

    Attention kernels compute s as sum(g_out out), from other sums than those in g = g_out v^T: where p = 1 their g - s
    is a rounding error, not the 0 of g - sum(g p). An `out` in 16 bits adds its own rounding; it averages values, and
    random signs have the same effect on sum(g p) as on such an average. Where the summands of a row cancel, the other
    rows show how large they were.
    """
    if not (m.by_formula and y.dim() and y.numel()):
        with m:
            return softmax_backward(grad, y, dim, dtype)
    signs = _signs(grad, m.random.randrange(2**31))
    size = grad.abs().amax(dim, keepdim=True)
    if grad.dim() > 1:
        across = (dim, -2 if dim % grad.dim() == grad.dim() - 1 else -1)
        size = torch.maximum(size, grad.square().mean(across, keepdim=True).sqrt())
    apart = grad + signs * max(unit_roundoff(grad.dtype), unit_roundoff(m.read_back)) * size
    return y * grad - y * orders.reduce(apart * y, dim, True, m.order())


_REWRITES: dict[str, Callable] = {
    "sum": _sum, "mean": _mean, "prod": _prod, "cumsum": _cumsum, "mm": _product, "bmm": _product, "mv": _mv,
    "dot": _dot, "vdot": _dot, "addmm": _addmm, "addmv": _addmm, "baddbmm": _addmm, "index_add": _index_add,
    "scatter_add": _scatter_add, "index_put": _index_put, "exp": _exp, "div": _div, "sigmoid": _sigmoid,
    "erf": _erf, "tanh": _tanh,
    "convolution": lambda m, *args: convolution_orders.convolution(m.order(), *args),
    "convolution_backward": lambda m, *args: convolution_orders.convolution_backward(m.order(), *args),
    "silu": _silu, "rsqrt": _rsqrt, "_softmax_backward_data": _softmax_backward,
}  # fmt: skip
