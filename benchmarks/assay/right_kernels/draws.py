"""Right kernels drawn at random: operator, shape, dtype, layout, a legal order for every sum, and legal formulas.

`draw(seed)` returns a target that agrees with its golden, in float32 with one rounding at the store, but sums in an
order of its own, forward and backward. Any finding of `assay.check` on it is a false alarm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from goldsmith import assay

from . import kinks, views
from .sums import Order, Product, Recipe, Sigmoid, Spread

ORDERS = ("torch", "sequential", "reversed", "permuted", "tiles", "pairwise", "split")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# operators


def _rmsnorm(recipe: Recipe):
    def kernel(x, w, eps):
        x32 = x.float()  # cast once: with two casts, each path's gradient would be rounded to 16 bits before the sum
        mean = recipe.sum(x32.square()) / x.shape[-1]
        inv = 1 / torch.sqrt(mean + eps) if recipe.reciprocal else torch.rsqrt(mean + eps)
        return (x32 * inv * Spread.apply(w.float(), len(x), recipe.order)).to(x.dtype)

    def golden(x, w, eps):
        inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
        return x * inv_rms * w

    T, D = recipe.tokens(), recipe.size(300)
    return kernel, golden, lambda make: {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


def _layernorm(recipe: Recipe):
    def kernel(x, w, b, eps):
        n, x32 = x.shape[-1], x.float()
        centred = x32 - recipe.sum(x32) / n
        inv = torch.rsqrt(recipe.sum(centred.square()) / n + eps)
        spread = [Spread.apply(t.float(), len(x), recipe.order) for t in (w, b)]
        return (centred * inv * spread[0] + spread[1]).to(x.dtype)

    def golden(x, w, b, eps):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * w + b

    T, D = recipe.tokens(), recipe.size(200) + 1
    return kernel, golden, lambda make: {"x": make.normal(T, D), "w": make.normal(D), "b": make.normal(D), "eps": 1e-5}


def _softmax(recipe: Recipe):
    def kernel(x):
        x32 = x.float()
        e = recipe.exp(x32 - x32.detach().amax(-1, keepdim=True))
        return recipe.divide(e, recipe.sum(e)).to(x.dtype)

    def golden(x):
        return torch.softmax(x, -1)

    T, D, std = recipe.tokens(), recipe.size(300), 2.0 ** recipe.rng.randint(-2, 3)
    return kernel, golden, lambda make: {"x": make.normal(T, D, std=std)}


def _matmul(recipe: Recipe):
    def kernel(a, b):
        return Product.apply(a.float(), b.float(), recipe.order).to(a.dtype)

    def golden(a, b):
        return a @ b

    M, K, N = recipe.tokens(), recipe.size(200), recipe.size(24)
    return kernel, golden, lambda make: {"a": make.normal(M, K), "b": make.normal(K, N)}


def _weighted_sum(recipe: Recipe):
    def kernel(x, w):
        return recipe.sum(x.float() * Spread.apply(w.float(), len(x), recipe.order)).squeeze(-1).to(x.dtype)

    def golden(x, w):
        return (assay.stage("terms", x * w)).sum(-1)

    T, D = recipe.tokens(), recipe.rng.choice((1, 5, 33, 100, 257, 1024, 3000))
    return kernel, golden, lambda make: {"x": make.normal(T, D), "w": make.normal(D)}


def _swiglu(recipe: Recipe):
    def kernel(a, b):
        a32 = a.float()
        return (a32 * Sigmoid.apply(a32, recipe) * b.float()).to(a.dtype)

    def golden(a, b):
        return torch.nn.functional.silu(a) * b

    T, D = recipe.tokens(), recipe.size(300)
    return kernel, golden, lambda make: {"a": make.normal(T, D), "b": make.normal(T, D)}


def _cross_entropy(recipe: Recipe):
    def kernel(logits, target):
        x = logits.float()
        top = x.detach().amax(-1, keepdim=True)
        lse = torch.log(recipe.sum(recipe.exp(x - top))) + top
        picked = x.gather(-1, target.unsqueeze(-1))
        return recipe.sum((lse - picked).squeeze(-1), 0).squeeze(0) / len(target)

    def golden(logits, target):
        return torch.nn.functional.cross_entropy(logits, target)

    T, V = recipe.tokens() + 1, recipe.size(200) + 1
    return kernel, golden, lambda make: {"logits": make.normal(T, V), "target": make.integers(0, V, T)}


def _attention(recipe: Recipe):
    def kernel(q, k, v):
        q32, k32, v32 = (t.float() for t in (q, k, v))
        s = Product.apply(q32, k32.mT, recipe.order) * (1 / math.sqrt(q.shape[-1]))
        hidden = ~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        s = s.masked_fill(hidden, -math.inf)
        p = recipe.exp(s - s.detach().amax(-1, keepdim=True))
        return recipe.divide(Product.apply(p, v32, recipe.order), recipe.sum(p)).to(q.dtype)

    def golden(q, k, v):
        s = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = ~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        return torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v

    S, D = recipe.rng.choice((1, 2, 5, 8, 17)), recipe.rng.choice((1, 4, 8, 16))
    return kernel, golden, lambda make: {"q": make.normal(S, D), "k": make.normal(S + 3, D), "v": make.normal(S + 3, D)}


OPERATORS: dict[str, Callable[[Recipe], tuple]] = {
    "rmsnorm": _rmsnorm, "layernorm": _layernorm, "softmax": _softmax, "matmul": _matmul, "weighted_sum": _weighted_sum,
    "swiglu": _swiglu, "cross_entropy": _cross_entropy, "attention": _attention, **kinks.OPERATORS,
    **views.OPERATORS,
}  # fmt: skip


# layouts and values of the inputs


def _as_given(t: Tensor, how: str) -> Tensor:
    if how == "transposed" and t.dim() >= 2:
        return t.mT.contiguous().mT
    if how == "sliced" and t.dim() and t.numel():
        wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
        wide[..., ::2] = t
        return wide[..., ::2]
    return t


def draw(seed: int) -> tuple[assay.Target, str]:
    """The target of a right kernel, and its description; equal seeds give equal targets."""
    rng = random.Random(seed)
    name = rng.choice(list(OPERATORS))
    order = Order(rng.choice(ORDERS), rng.choice((16, 32, 64, 128, 256)), rng.randrange(2**31))
    recipe = Recipe(rng, order, rng.random() < 0.5, rng.random() < 0.5)
    kernel, golden, build = OPERATORS[name](recipe)
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
