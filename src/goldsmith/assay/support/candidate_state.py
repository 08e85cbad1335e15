"""Snapshot of the state that a candidate keeps in its module and closures, to run it without that state.

The snapshot copies the contents of dicts, lists and sets before the first call, but not the tensors in them. A run
within `cleared` sees those contents and empty functools caches; afterwards the current state is restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from ..declare.target import Target

_KINDS = (dict, list, set)


class CandidateState:
    """The containers that a target's own functions can reach, with copies of their contents."""

    def __init__(self, target: Target | Any):
        """target: or anything with a candidate and a backward; if it has a runner, that one keeps the state."""
        self.runner = getattr(target, "runner", None)
        self.caches: list[Any] = []
        self.contents: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for function in (target.candidate, target.backward) if self.runner is None else ():
            for value in _reached(function):
                if id(value) in seen:
                    continue
                seen.add(id(value))
                if type(value) in _KINDS:
                    self.contents.append((value, value.copy()))
                elif callable(getattr(value, "cache_clear", None)):
                    self.caches.append(value)

    @property
    def changed(self) -> bool:
        """True if the contents differ from the snapshot; compares entries by identity."""
        if self.runner is not None:
            return bool(self.runner.state_changed())
        return any(_names(now) != _names(then) for now, then in self.contents) or any(
            callable(getattr(c, "cache_info", None)) and c.cache_info().currsize for c in self.caches
        )

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Restore the state from before the first call within this context."""
        if self.runner is not None:
            with self.runner.cleared():
                yield
            return
        moved = [(value, then) for value, then in self.contents if _names(value) != _names(then)]
        now = [(value, value.copy()) for value, _ in moved]
        for cache in self.caches:
            cache.cache_clear()
        _put(moved)
        try:
            yield
        finally:
            _put(now)
            for cache in self.caches:
                cache.cache_clear()


def _put(contents: list[tuple[Any, Any]]) -> None:
    for value, content in contents:
        value.clear()
        value.extend(content) if isinstance(value, list) else value.update(content)


def _names(value: Any) -> list[Any]:
    """A container's entries by identity, since entries may be tensors, whose == gives no bool."""
    if isinstance(value, dict):
        return [(id(k) if not isinstance(k, int | str | tuple) else repr(k), id(v)) for k, v in value.items()]
    return sorted(map(id, value)) if isinstance(value, set) else list(map(id, value))


def _reached(function: Callable | str | None) -> Iterator[Any]:
    """Values in a function's module and closure; for a partial, method or callable object, those of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from getattr(owner, "__dict__", {}).values()
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        function = vars(type(function)).get("__call__")
    if not isinstance(function, FunctionType):
        return
    if not (function.__module__ or "").startswith("torch"):  # functions created by exec() have no module
        yield from (v for name, v in function.__globals__.items() if not name.startswith("__"))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
