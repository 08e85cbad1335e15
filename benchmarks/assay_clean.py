"""Right kernels, drawn at random: an operator, a shape, a dtype, a layout, a legal order for every sum, legal formulas.

`draw(seed)` returns a target that computes what its golden says, in float32 with one rounding at the store, but adds
in an order of its own, forward and backward. Whatever `assay.check` finds in it is a false alarm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import assay_clean_kinks
import assay_clean_views
from goldsmith import assay

ORDERS = ("torch", "sequential", "reversed", "permuted", "tiles", "pairwise", "split")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# sums in an order of one's own


@dataclass
class Order:
    """A way of adding n terms; `tile` and `seed` belong to some of them."""

    name: str
    tile: int
    seed: int

    def fold(self, rows: Tensor) -> Tensor:
        """(n, m) -> (m,) in float32"""
        n = len(rows)
        if self.name == "torch" or n < 2 or rows.shape[1] == 0:
            return rows.sum(0)
        if self.name == "reversed":
            return _sequential(rows.flip(0))
        if self.name == "permuted":
            return _sequential(rows[torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))])
        if self.name == "tiles":
            return _sequential(torch.stack([t.sum(0) for t in rows.split(self.tile)]))
        if self.name == "split":
            return sum((_sequential(part) for part in rows.tensor_split(min(4, n))), torch.zeros_like(rows[0]))
        if self.name == "pairwise":
            while len(rows) > 1:
                half = len(rows) // 2
                rows = torch.cat([rows[:half] + rows[half : 2 * half], rows[2 * half :]])
            return rows[0]
        return _sequential(rows)


def _sequential(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


class Sum(torch.autograd.Function):
    """sum over one axis, kept"""

    @staticmethod
    def forward(ctx, x, axis, order):
        ctx.shape = x.shape
        moved = x.movedim(axis, 0)
        total = order.fold(moved.reshape(moved.shape[0], math.prod(moved.shape[1:])))
        return total.reshape(moved.shape[1:]).unsqueeze(axis if axis >= 0 else x.dim() + axis)

    @staticmethod
    def backward(ctx, g):
        return g.expand(ctx.shape), None, None


class Spread(torch.autograd.Function):
    """w [D] -> [T, D]; the gradient is added up over T"""

    @staticmethod
    def forward(ctx, w, rows, order):
        ctx.order = order
        return w.expand(rows, len(w)).clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.order.fold(g) if len(g) else torch.zeros(g.shape[1]), None, None


class Product(torch.autograd.Function):
    """a b, all three products in the same order"""

    @staticmethod
    def forward(ctx, a, b, order):
        ctx.save_for_backward(a, b)
        ctx.order = order
        return _product(a, b, order)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return _product(g, b.mT, ctx.order), _product(a.mT, g, ctx.order), None


def _product(a: Tensor, b: Tensor, order: Order) -> Tensor:
    if order.name == "torch" or 0 in a.shape or 0 in b.shape:
        return a @ b
    terms = (a.mT.unsqueeze(-1) * b.unsqueeze(-2)).flatten(1)
    return order.fold(terms).reshape(a.shape[0], b.shape[1])


class Sigmoid(torch.autograd.Function):
    """s = 1 / (1 + exp(-a)), ds = s (1 - s); autograd through the formula would give 0 * inf where exp(-a) overflows"""

    @staticmethod
    def forward(ctx, a, plan):
        s = plan.divide(torch.ones_like(a), 1 + plan.exp(-a))
        ctx.save_for_backward(s)
        return s

    @staticmethod
    def backward(ctx, g):
        (s,) = ctx.saved_tensors
        return g * s * (1 - s), None


# operators


@dataclass
class Plan:
    """What one clean run draws: its random source, the order of its sums, and its formulas."""

    rng: random.Random
    order: Order
    exp2: bool
    reciprocal: bool

    def sum(self, x: Tensor, axis: int = -1) -> Tensor:
        return Sum.apply(x, axis, self.order)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x * math.log2(math.e)) if self.exp2 else torch.exp(x)

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return a * (1 / b) if self.reciprocal else a / b

    def size(self, top: int) -> int:
        return self.rng.choice((1, 2, 3, 7, 8, 16, 31, 64, 65, 100, 127, 128, 200, 256, 1000)) % top + 1

    def tokens(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 3, 5, 8, 13, 32, 33))


def _rmsnorm(plan: Plan):
    def kernel(x, w, eps):
        x32 = x.float()  # once: two casts would round each path's gradient to 16 bits before they are added
        mean = plan.sum(x32.square()) / x.shape[-1]
        inv = 1 / torch.sqrt(mean + eps) if plan.reciprocal else torch.rsqrt(mean + eps)
        return (x32 * inv * Spread.apply(w.float(), len(x), plan.order)).to(x.dtype)

    def golden(x, w, eps):
        inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
        return x * inv_rms * w

    T, D = plan.tokens(), plan.size(300)
    return kernel, golden, lambda make: {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


def _layernorm(plan: Plan):
    def kernel(x, w, b, eps):
        n, x32 = x.shape[-1], x.float()
        centred = x32 - plan.sum(x32) / n
        inv = torch.rsqrt(plan.sum(centred.square()) / n + eps)
        spread = [Spread.apply(t.float(), len(x), plan.order) for t in (w, b)]
        return (centred * inv * spread[0] + spread[1]).to(x.dtype)

    def golden(x, w, b, eps):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * w + b

    T, D = plan.tokens(), plan.size(200) + 1
    return kernel, golden, lambda make: {"x": make.normal(T, D), "w": make.normal(D), "b": make.normal(D), "eps": 1e-5}


def _softmax(plan: Plan):
    def kernel(x):
        x32 = x.float()
        e = plan.exp(x32 - x32.detach().amax(-1, keepdim=True))
        return plan.divide(e, plan.sum(e)).to(x.dtype)

    def golden(x):
        return torch.softmax(x, -1)

    T, D, std = plan.tokens(), plan.size(300), 2.0 ** plan.rng.randint(-2, 3)
    return kernel, golden, lambda make: {"x": make.normal(T, D, std=std)}


def _matmul(plan: Plan):
    def kernel(a, b):
        return Product.apply(a.float(), b.float(), plan.order).to(a.dtype)

    def golden(a, b):
        return a @ b

    M, K, N = plan.tokens(), plan.size(200), plan.size(24)
    return kernel, golden, lambda make: {"a": make.normal(M, K), "b": make.normal(K, N)}


def _weighted_sum(plan: Plan):
    def kernel(x, w):
        return plan.sum(x.float() * Spread.apply(w.float(), len(x), plan.order)).squeeze(-1).to(x.dtype)

    def golden(x, w):
        return (assay.stage("terms", x * w)).sum(-1)

    T, D = plan.tokens(), plan.rng.choice((1, 5, 33, 100, 257, 1024, 3000))
    return kernel, golden, lambda make: {"x": make.normal(T, D), "w": make.normal(D)}


def _swiglu(plan: Plan):
    def kernel(a, b):
        a32 = a.float()
        return (a32 * Sigmoid.apply(a32, plan) * b.float()).to(a.dtype)

    def golden(a, b):
        return torch.nn.functional.silu(a) * b

    T, D = plan.tokens(), plan.size(300)
    return kernel, golden, lambda make: {"a": make.normal(T, D), "b": make.normal(T, D)}


def _cross_entropy(plan: Plan):
    def kernel(logits, target):
        x = logits.float()
        top = x.detach().amax(-1, keepdim=True)
        lse = torch.log(plan.sum(plan.exp(x - top))) + top
        picked = x.gather(-1, target.unsqueeze(-1))
        return plan.sum((lse - picked).squeeze(-1), 0).squeeze(0) / len(target)

    def golden(logits, target):
        return torch.nn.functional.cross_entropy(logits, target)

    T, V = plan.tokens() + 1, plan.size(200) + 1
    return kernel, golden, lambda make: {"logits": make.normal(T, V), "target": make.integers(0, V, T)}


def _attention(plan: Plan):
    def kernel(q, k, v):
        q32, k32, v32 = (t.float() for t in (q, k, v))
        s = Product.apply(q32, k32.mT, plan.order) * (1 / math.sqrt(q.shape[-1]))
        hidden = ~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        s = s.masked_fill(hidden, -math.inf)
        p = plan.exp(s - s.detach().amax(-1, keepdim=True))
        return plan.divide(Product.apply(p, v32, plan.order), plan.sum(p)).to(q.dtype)

    def golden(q, k, v):
        s = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = ~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        return torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v

    S, D = plan.rng.choice((1, 2, 5, 8, 17)), plan.rng.choice((1, 4, 8, 16))
    return kernel, golden, lambda make: {"q": make.normal(S, D), "k": make.normal(S + 3, D), "v": make.normal(S + 3, D)}


OPERATORS: dict[str, Callable[[Plan], tuple]] = {
    "rmsnorm": _rmsnorm, "layernorm": _layernorm, "softmax": _softmax, "matmul": _matmul, "weighted_sum": _weighted_sum,
    "swiglu": _swiglu, "cross_entropy": _cross_entropy, "attention": _attention, **assay_clean_kinks.OPERATORS,
    **assay_clean_views.OPERATORS,
}  # fmt: skip


# layouts and values of the inputs as the case gives them


def _as_given(t: Tensor, how: str) -> Tensor:
    if how == "transposed" and t.dim() >= 2:
        return t.mT.contiguous().mT
    if how == "sliced" and t.dim() and t.numel():
        wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
        wide[..., ::2] = t
        return wide[..., ::2]
    return t


def draw(seed: int) -> tuple[assay.Target, str]:
    """A right kernel with its target, and what was drawn in words; the same for the same seed."""
    rng = random.Random(seed)
    name = rng.choice(list(OPERATORS))
    order = Order(rng.choice(ORDERS), rng.choice((16, 32, 64, 128, 256)), rng.randrange(2**31))
    plan = Plan(rng, order, rng.random() < 0.5, rng.random() < 0.5)
    kernel, golden, build = OPERATORS[name](plan)
    dtype = rng.choice(DTYPES)
    given = rng.choice(("contiguous", "contiguous", "transposed", "sliced"))
    scale = 2.0 ** rng.choice((0, 0, 0, -4, 3))

    def clean(make):
        drawn = build(make)
        return {
            n: _as_given(v * scale, given) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in drawn.items()
        }

    cases = assay.case()(clean)
    target = assay.Target(kernel, golden, cases=cases, name=name, dtypes=(dtype,))
    shapes = {n: list(v.shape) for n, v in cases[0].build(dtype, "cpu", seed).items() if isinstance(v, Tensor)}
    words = f"{name} {str(dtype).removeprefix('torch.')} {shapes} {order.name} {given} x{scale:g}"
    return target, words
