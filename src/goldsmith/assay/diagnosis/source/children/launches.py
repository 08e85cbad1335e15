"""Launches of Triton kernels, recorded in the interpreter as a compiler needs them: types and constants by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Protocol

from ....execute.interpreter import MODULE

Launch = tuple[str, str, tuple[tuple[str, str], ...], tuple[tuple[str, object], ...]]  # module, name, types, constants
_PLAIN = (bool, int, float, str, type(None))


class _Executor(Protocol):
    fn: FunctionType
    arg_names: list[str]
    constexprs: list[str]


@contextmanager
def recorded_launches() -> Iterator[set[Launch | None]]:
    """Context with the launches so far; None stands for one with an argument that cannot be named."""
    found: set[Launch | None] = set()
    module = sys.modules.get(MODULE)
    executor = getattr(module, "GridExecutor", None)
    if executor is None:
        yield found
        return
    whole = executor.__call__

    def launch(self: _Executor, *args: object, **kwargs: object) -> object:
        named = {n: v for n, v in kwargs.items() if n in self.arg_names}
        found.add(_launch(self, dict(zip(self.arg_names, args, strict=False)) | named))
        return whole(self, *args, **kwargs)

    executor.__call__ = launch
    try:
        yield found
    finally:
        executor.__call__ = whole


def _launch(executor: _Executor, values: dict[str, object]) -> Launch | None:
    from triton.runtime.jit import mangle_type  # Triton is there, since one of its kernels is launched

    types, constants = [], []
    for name in executor.arg_names:
        value = values.get(name, _default(executor.fn, name))
        constant = name in executor.constexprs or value is None
        if constant:
            value = getattr(value, "value", value)
            kind = "constexpr"
        else:
            try:
                kind = mangle_type(value, True)
            except (TypeError, RuntimeError, AttributeError):
                return None
        if kind == "constexpr":
            if not isinstance(value, _PLAIN):
                return None
            constants.append((name, value))
        types.append((name, kind))
    return executor.fn.__globals__["__name__"], executor.fn.__name__, tuple(types), tuple(constants)


def _default(function: FunctionType, name: str) -> object:
    given = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(reversed(names), reversed(given), strict=False)).get(name)
