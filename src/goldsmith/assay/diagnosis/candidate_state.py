"""What a candidate keeps between calls in its module and its closures, and how it runs without having kept anything.

A snapshot is taken before the first call: the contents of dicts, lists and sets, not of the tensors in them. A run
*afresh* has those contents back, empties caches of functools, and leaves all as it found it.
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
    """The containers that a target's own functions can reach, with what they held when this was made."""

    def __init__(self, target: Target):
        self.caches: list[Any] = []
        self.contents: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for function in (target.candidate, target.backward):
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
        """Whether something is kept by now that was not, or the other way round; entries are compared by identity."""
        return any(_names(now) != _names(then) for now, then in self.contents) or any(
            callable(getattr(c, "cache_info", None)) and c.cache_info().currsize for c in self.caches
        )

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """As before the first call, while this lasts."""
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
    """What a container holds, by identity: contents may be tensors, whose equality is no bool."""
    if isinstance(value, dict):
        return [(id(k) if not isinstance(k, int | str | tuple) else repr(k), id(v)) for k, v in value.items()]
    return sorted(map(id, value)) if isinstance(value, set) else list(map(id, value))


def _reached(function: Callable | str | None) -> Iterator[Any]:
    """The values of a function's module and closure; of a partial, a method or a callable object those of its own."""
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
    if not (function.__module__ or "").startswith("torch"):  # code of exec() has no module
        yield from (v for name, v in function.__globals__.items() if not name.startswith("__"))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
