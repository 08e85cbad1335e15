"""Gradients that a candidate's own autograd functions return, before autograd sums, broadcasts or casts them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

Misfit = tuple[str, int, str]  # function, position of the input, what its gradient has otherwise


class _Context(Protocol):
    needs_input_grad: tuple[bool, ...]
    next_functions: tuple[tuple[Node | None, int], ...]


def watch(modules: Iterable[ModuleType], misfits: set[Misfit]) -> None:
    """Notes every gradient whose shape or dtype is not its input's, whenever a `backward` of these modules returns."""
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, type) and issubclass(value, Function) and value.__module__ == module.__name__:
                own = vars(value).get("backward")
                if isinstance(own, staticmethod):
                    value.backward = staticmethod(_noting(value.__name__, own.__func__, misfits))  # type: ignore[method-assign]


def _noting(name: str, backward: Callable[..., object], misfits: set[Misfit]) -> Callable[..., object]:
    @functools.wraps(backward)
    def noting(ctx: _Context, *grads: object) -> object:
        returned = backward(ctx, *grads)
        listed = returned if isinstance(returned, tuple) else (returned,)
        misfits.update((name, place, what) for place, what in _misfits(ctx, listed))
        return returned

    return noting


def _misfits(ctx: _Context, returned: tuple[object, ...]) -> Iterator[tuple[int, str]]:
    """Position and what differs. Only inputs that need a gradient have a next function."""
    places = [n for n, needed in enumerate(ctx.needs_input_grad) if needed]
    after = [(function, number) for function, number in ctx.next_functions if function is not None]
    if len(places) != len(after):
        return
    for place, (function, number) in zip(places, after, strict=True):
        grad = returned[place] if place < len(returned) else None
        if isinstance(grad, Tensor):
            wanted = function._input_metadata[number]  # type: ignore[attr-defined]
            if tuple(grad.shape) != tuple(wanted.shape):
                yield place, "shape"
            if grad.dtype != wanted.dtype:
                yield place, "dtype"
