"""Right kernels with kinks and ties, drawn at random: maxima, pools, gates, order statistics.

Where values tie, or an input is exactly on a kink, more than one gradient is right. The first of the tied elements may
get it, the last one, or all in equal parts; the slope at a kink may be that of either side. Every kernel draws its
convention, and half of the inputs take few different values, so that ties are frequent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .sums import Product, Recipe

TIES = ("first", "last", "equal")


class Chosen(torch.autograd.Function):
    """The maximum of every row; `ties` says which of the tied elements get the gradient. NaN is the maximum."""

    @staticmethod
    def forward(ctx, x: Tensor, ties: str):
        y = x.amax(-1, keepdim=True)
        ctx.save_for_backward(x, y)
        ctx.ties = ties
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * shares((x == y) | ((x != x) & (y != y)), ctx.ties), None


def shares(tied: Tensor, ties: str) -> Tensor:
    """The share of the row's gradient that each element gets."""
    if ties == "equal":
        return tied.float() / tied.sum(-1, keepdim=True)
    order = tied.flip(-1) if ties == "last" else tied
    first = order & (order.cumsum(-1) == 1)
    return (first.flip(-1) if ties == "last" else first).float()


class Gated(torch.autograd.Function):
    """y = f(x) with dy/dx = slope(x), both elementwise"""

    @staticmethod
    def forward(ctx, x: Tensor, f: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]):
        ctx.save_for_backward(slope(x).to(x.dtype))
        return f(x)

    @staticmethod
    def backward(ctx, g):
        (slope,) = ctx.saved_tensors
        return g * slope, None, None


class Larger(torch.autograd.Function):
    """max(a, b); at a tie the gradient goes to a, to b, or to both in halves"""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, ties: str):
        share = {"first": 1.0, "last": 0.0, "equal": 0.5}[ties]
        ctx.save_for_backward(torch.where(a == b, share, (a > b).float()))
        return torch.maximum(a, b)

    @staticmethod
    def backward(ctx, g):
        (share,) = ctx.saved_tensors
        return g * share, g * (1 - share), None


class Ranked(torch.autograd.Function):
    """The elements of every row by rank; tied elements come in either order"""

    @staticmethod
    def forward(ctx, x: Tensor, descending: bool, backwards: bool, ranks: slice):
        turned = x.flip(-1) if backwards else x
        index = turned.argsort(dim=-1, descending=descending, stable=True)[..., ranks]
        index = x.shape[-1] - 1 - index if backwards else index
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter(-1, index, g), None, None, None


def _levels(recipe: Recipe) -> Callable[..., Tensor]:
    """How to draw the inputs: normal, or from a few levels."""
    levels = recipe.rng.choice((0, 0, 4, 16, 64))
    return lambda make, *shape: make.tied(*shape, levels=levels) if levels else make.normal(*shape)


def _rows(recipe: Recipe, top: int = 100):
    T, D, drawn = recipe.tokens(), recipe.size(top) + 1, _levels(recipe)
    return lambda make: {"x": drawn(make, T, D)}


def _gate(recipe: Recipe, f: Callable[[Tensor], Tensor], open_at_the_kink: Callable, shut_at_the_kink: Callable):
    slope = recipe.rng.choice((open_at_the_kink, shut_at_the_kink))
    build = _rows(recipe)
    return lambda x: Gated.apply(x.float(), f, slope).to(x.dtype), f, build


def _relu(recipe: Recipe):
    return _gate(recipe, torch.relu, lambda x: ~(x < 0), lambda x: x > 0)


def _clamp(recipe: Recipe):
    return _gate(
        recipe, lambda x: x.clamp(-0.5, 0.5), lambda x: ~(x < -0.5) & ~(x > 0.5), lambda x: (x > -0.5) & (x < 0.5)
    )


def _abs(recipe: Recipe):
    return _gate(recipe, torch.abs, lambda x: torch.where(x < 0, -1.0, 1.0), torch.sign)


def _leaky_relu(recipe: Recipe):
    f = lambda x: torch.nn.functional.leaky_relu(x, 0.125)  # noqa: E731
    return _gate(recipe, f, lambda x: torch.where(x < 0, 0.125, 1.0), lambda x: torch.where(x > 0, 1.0, 0.125))


def _relu_of_a_product(recipe: Recipe):
    """relu(a b): the kink is where a rounded sum crosses zero."""
    slope = recipe.rng.choice((lambda x: ~(x < 0), lambda x: x > 0))
    M, K, N, drawn = recipe.tokens(), recipe.size(64), recipe.size(24), _levels(recipe)

    def kernel(a, b):
        return Gated.apply(Product.apply(a.float(), b.float(), recipe.order), torch.relu, slope).to(a.dtype)

    return kernel, lambda a, b: torch.relu(a @ b), lambda make: {"a": drawn(make, M, K), "b": drawn(make, K, N)}


def _maximum(recipe: Recipe):
    ties, T, D, drawn = recipe.rng.choice(TIES), recipe.tokens(), recipe.size(100), _levels(recipe)

    def kernel(a, b):
        return Larger.apply(a.float(), b.float(), ties).to(a.dtype)

    return kernel, torch.maximum, lambda make: {"a": drawn(make, T, D), "b": drawn(make, T, D)}


def _amax(recipe: Recipe):
    ties = recipe.rng.choice(TIES)
    golden = recipe.rng.choice((lambda x: x.amax(-1), lambda x: x.max(-1).values))
    return lambda x: Chosen.apply(x.float(), ties).squeeze(-1).to(x.dtype), golden, _rows(recipe)


def _absmax(recipe: Recipe):
    """The largest magnitude of every row, as quantisers use it."""
    ties = recipe.rng.choice(TIES)
    sign = recipe.rng.choice((torch.sign, lambda x: torch.where(x < 0, -1.0, 1.0)))

    def kernel(x):
        return Chosen.apply(Gated.apply(x.float(), torch.abs, sign), ties).squeeze(-1).to(x.dtype)

    return kernel, lambda x: x.abs().amax(-1), _rows(recipe)


def _max_pool(recipe: Recipe):
    """Overlapping windows, so that one element may be the maximum of several."""
    ties, size, step = recipe.rng.choice(TIES), recipe.rng.choice((2, 3, 5)), recipe.rng.choice((1, 2, 3))
    T, D, drawn = recipe.tokens() + 1, recipe.size(100) + size, _levels(recipe)

    def kernel(x):
        return Chosen.apply(x.float().unfold(-1, size, step), ties).squeeze(-1).to(x.dtype)

    def golden(x):
        return torch.nn.functional.max_pool1d(x, size, step)

    return kernel, golden, lambda make: {"x": drawn(make, T, 3, D)}


def _where(recipe: Recipe):
    T, D, drawn = recipe.tokens(), recipe.size(100), _levels(recipe)

    def kernel(x, a, b):
        mask = x.float() > 0.25
        return torch.where(mask, a.float(), b.float()).to(a.dtype)

    def golden(x, a, b):
        return torch.where(x > 0.25, a, b)

    return kernel, golden, lambda make: {k: drawn(make, T, D) for k in ("x", "a", "b")}


def _sort(recipe: Recipe):
    descending, backwards = recipe.rng.random() < 0.5, recipe.rng.random() < 0.5

    def kernel(x):
        return Ranked.apply(x.float(), descending, backwards, slice(None)).to(x.dtype)

    return kernel, lambda x: torch.sort(x, dim=-1, descending=descending).values, _rows(recipe)


def _topk(recipe: Recipe):
    backwards, k = recipe.rng.random() < 0.5, recipe.rng.choice((1, 2, 4))
    T, D, drawn = recipe.tokens(), recipe.size(100) + 4, _levels(recipe)

    def kernel(x):
        return Ranked.apply(x.float(), True, backwards, slice(k)).to(x.dtype)

    return kernel, lambda x: torch.topk(x, k, -1).values, lambda make: {"x": drawn(make, T, D)}


def _median(recipe: Recipe):
    backwards, T, D, drawn = recipe.rng.random() < 0.5, recipe.tokens(), recipe.size(100) + 1, _levels(recipe)
    at = (D - 1) // 2

    def kernel(x):
        y = Ranked.apply(x.float(), False, backwards, slice(at, at + 1)).squeeze(-1)
        return torch.where(x.isnan().any(-1), torch.nan, y).to(x.dtype)

    return kernel, lambda x: torch.median(x, -1).values, lambda make: {"x": drawn(make, T, D)}


OPERATORS: dict[str, Callable[[Recipe], tuple]] = {
    "relu": _relu, "clamp": _clamp, "abs": _abs, "leaky_relu": _leaky_relu, "relu_of_a_product": _relu_of_a_product,
    "maximum": _maximum, "amax": _amax, "absmax": _absmax, "max_pool": _max_pool, "where": _where, "sort": _sort,
    "topk": _topk, "median": _median,
}  # fmt: skip
