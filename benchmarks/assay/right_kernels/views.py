"""Right kernels, drawn at random, that write in place into a view under autograd.

Autograd handles the gradient of such a write through views of a copy, at the view's offset in its base. Goldens are out
of place, so a gradient at a wrong offset shows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from .sums import Recipe


def _column(recipe: Recipe):
    T, D = recipe.tokens(), recipe.size(100)
    at = recipe.rng.randrange(D)

    def kernel(x):
        y = x.float() * 1.0
        y[:, at] += 1
        return y.to(x.dtype)

    def golden(x):
        return x + torch.nn.functional.one_hot(torch.tensor(at, device=x.device), D).to(x.dtype)

    return kernel, golden, lambda make: {"x": make.normal(T, D)}


def _rows_of_zeros(recipe: Recipe):
    T, D, before = recipe.tokens(), recipe.size(100), recipe.rng.choice((1, 2, 5))

    def kernel(x):
        y = torch.zeros(T + before, D, dtype=x.dtype)
        y[before:] = x
        return y

    return kernel, lambda x: pad(x, (0, 0, before, 0)), lambda make: {"x": make.normal(T, D)}


def _rows_of_empty(recipe: Recipe):
    T, D, after = recipe.tokens(), recipe.size(100), recipe.rng.choice((0, 1, 5))

    def kernel(x):
        y = torch.empty(T + after, D, dtype=x.dtype)
        y[:T].copy_(x)
        y[T:].zero_()
        return y

    return kernel, lambda x: pad(x, (0, 0, 0, after)), lambda make: {"x": make.normal(T, D)}


def _half_turn(recipe: Recipe):
    T, half = recipe.tokens(), recipe.size(50)

    def kernel(x):
        y = torch.empty_like(x)
        y[:, :half] = -x[:, half:]
        y[:, half:] = x[:, :half]
        return y

    def golden(x):
        return torch.cat([-x[:, half:], x[:, :half]], -1)

    return kernel, golden, lambda make: {"x": make.normal(T, 2 * half)}


def _every_other(recipe: Recipe):
    T, D, start = recipe.tokens(), recipe.size(100) + 1, recipe.rng.choice((0, 1))
    transposed = recipe.rng.random() < 0.5

    def kernel(x):
        y = (x.mT.float() * 1.0).mT if transposed else x.float() * 1.0
        y[:, start::2].neg_()
        return y.to(x.dtype)

    def golden(x):
        return x * torch.where(torch.arange(D, device=x.device) % 2 == start, -1, 1)

    return kernel, golden, lambda make: {"x": make.normal(T, D)}


def _from_the_first(recipe: Recipe):
    """Views at their own offset, in a buffer that begins at offset 0 of its storage."""
    T, D = recipe.tokens() + 1, recipe.size(100)

    def kernel(x):
        y = torch.empty(T, 2 * D, dtype=x.dtype)
        for column in (0, D):
            torch.as_strided(y, (T, D), (2 * D, 1), column).copy_(x)
        return y

    return kernel, lambda x: torch.cat([x, x], -1), lambda make: {"x": make.normal(T, D)}


OPERATORS: dict[str, Callable[[Recipe], tuple]] = {
    "add_to_a_column": _column, "rows_of_zeros": _rows_of_zeros, "rows_of_empty": _rows_of_empty,
    "half_turn": _half_turn, "every_other_negated": _every_other, "strided_from_the_first": _from_the_first,
}  # fmt: skip
