"""Gradients that a candidate's own autograd functions return, before autograd sums, broadcasts or casts them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function

Misfit = tuple[str, int, str]  # (function, position of an input, "shape" or "dtype": what its gradient has otherwise)
Call = Callable[..., object]


class _Context(Protocol):
    needs_input_grad: tuple[bool, ...]
    goldsmith_inputs: tuple[tuple[torch.Size, torch.dtype] | None, ...]


def watch(modules: Iterable[ModuleType], misfits: set[Misfit]) -> None:
    """Notes every gradient whose shape or dtype is not its input's, whenever a `backward` of these modules returns."""
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, type) and issubclass(value, Function) and value.__module__ == module.__name__:
                _watch(value, misfits)


def _watch(function: type[Function], misfits: set[Misfit]) -> None:
    own = vars(function)
    first = "setup_context" if "setup_context" in own else "forward"
    if isinstance(own.get(first), staticmethod) and isinstance(own.get("backward"), staticmethod):
        keeping = _keeping(own[first].__func__, first == "forward")
        noting = _noting(function.__name__, own["backward"].__func__, misfits)
        setattr(function, first, staticmethod(keeping))
        function.backward = staticmethod(noting)  # type: ignore[method-assign]


def _keeping(call: Call, forward: bool) -> Call:
    """Keeps shapes and dtypes of the inputs in the context."""

    @functools.wraps(call)
    def keeping(ctx: _Context, *args: object, **named: object) -> object:
        inputs = args if forward or not args else args[0]
        listed = inputs if isinstance(inputs, tuple) else ()
        ctx.goldsmith_inputs = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else None for t in listed)
        return call(ctx, *args, **named)

    return keeping


def _noting(name: str, backward: Call, misfits: set[Misfit]) -> Call:
    @functools.wraps(backward)
    def noting(ctx: _Context, *grads: object) -> object:
        returned = backward(ctx, *grads)
        listed = returned if isinstance(returned, tuple) else (returned,)
        misfits.update((name, place, what) for place, what in _misfits(ctx, listed))
        return returned

    return noting


def _misfits(ctx: _Context, returned: Sequence[object]) -> Iterator[tuple[int, str]]:
    """Position and what differs."""
    for place, (grad, own) in enumerate(zip(returned, ctx.goldsmith_inputs, strict=False)):
        if isinstance(grad, Tensor) and own is not None and ctx.needs_input_grad[place]:
            if grad.shape != own[0]:
                yield place, "shape"
            if grad.dtype != own[1]:
                yield place, "dtype"
