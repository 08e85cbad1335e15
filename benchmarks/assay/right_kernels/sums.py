"""Sums in a chosen order, forward and backward, and the formulas of one right kernel."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Order:
    """An order in which to add n terms; only some orders use `tile` and `seed`."""

    name: str
    tile: int
    seed: int

    def fold(self, rows: Tensor) -> Tensor:
        """(n, m) -> (m,), in float32"""
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
    """The sum over one axis, which stays with size 1."""

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
    """w [D] -> [T, D]; the gradient is the sum over T."""

    @staticmethod
    def forward(ctx, w, rows, order):
        ctx.order = order
        return w.expand(rows, len(w)).clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.order.fold(g) if len(g) else torch.zeros(g.shape[1]), None, None


class Product(torch.autograd.Function):
    """a b; all three products add in the same order."""

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
    def forward(ctx, a, recipe):
        s = recipe.divide(torch.ones_like(a), 1 + recipe.exp(-a))
        ctx.save_for_backward(s)
        return s

    @staticmethod
    def backward(ctx, g):
        (s,) = ctx.saved_tensors
        return g * s * (1 - s), None


@dataclass
class Recipe:
    """The random choices of one right kernel: its generator, the order of its sums, and its formulas."""

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
