"""renamed_argument: the old name of an argument still works, with a DeprecationWarning that has the new one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator of functions whose argument `old` is now called `new`."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            if old in named and new not in named:
                text = f"{function.__qualname__}: the argument {old!r} is now called {new!r}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                named[new] = named.pop(old)
            return function(*args, **named)

        return call

    return decorated
