"""KnownFunctions: the functions, classes, constants and modules of torch, Python and the assay as they were.

They show what a candidate has replaced: the object behind a name, or the code or the defaults of a function.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from . import object_words
from .known_modules import SET_BY_TORCH, namespace

_OURS = "goldsmith"
_OWNERS = (
    "torch", "torch.Tensor", "torch.nn", "torch.utils._pytree", "sys", "operator", "functools", "itertools", "copy",
    "torch.nn.functional", "torch.autograd", "torch.cuda", "torch.testing", "torch.linalg",
    "torch.utils._python_dispatch", "torch.autograd.Function", "torch.nn.Module", "time", "random", "builtins", "gc",
    "os", "threading", "socket.socket", "json", "struct", "math", "statistics", "inspect",
    "numpy", "numpy.testing",
)  # fmt: skip
_PARTS = object_words.PARTS[:3]  # those that can be set
_CONSTANTS = (int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, types.ModuleType)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", f"{os.sep}torch{os.sep}")


class _Present:
    """What names stand for, compared by identity, where the words of a namespace or a function differ."""

    def __init__(
        self, attributes: list[tuple[Any, str]], functions: list[tuple[Any, Any]], classes: list[type]
    ) -> None:
        names = dict[int, tuple[Any, list[str]]]()
        for owner, name in attributes:
            names.setdefault(id(owner), (owner, []))[1].append(name)
        for kind in classes:
            names.setdefault(id(kind), (kind, []))
        keys = {id(owner): set(vars(owner)) for owner in classes}
        self.owners = [
            (vars(owner), known, list(map(vars(owner).get, known)), keys.get(id(owner)))
            for owner, known in names.values()
        ]
        self.functions = functions
        self.tags = object_words.of_dicts([namespace(owner) or {} for owner, _ in names.values()])
        self.words = object_words.of_functions([f for f, _ in functions])

    def unchanged(self) -> bool:
        return all(map(self._same_names, self.tags.changed())) and all(map(self._same_parts, self.words.changed()))

    def _same_names(self, number: int) -> bool:
        values, names, known, keys = self.owners[number]
        return all(map(is_, map(values.get, names), known)) and keys in (None, values.keys())

    def _same_parts(self, number: int) -> bool:
        function, body = self.functions[number]
        return _same(_body(function), body)


class KnownFunctions:
    """Made before the code that may replace something; a library that replaces torch's functions is no candidate."""

    def __init__(self) -> None:
        self.functions = [
            (owner, attribute, value, _body(value), f"{name}.{attribute}")
            for name, owner in _owners()
            for attribute, value in list(vars(owner).items())
            if f"{name}.{attribute}" not in SET_BY_TORCH
            if callable(value)
            or isinstance(value, staticmethod | classmethod | property)
            or name in _OWNERS
            and isinstance(value, _CONSTANTS)
            and not attribute.startswith("_")
        ]
        self.modules = _Modules()
        self.functions += [
            (self.modules, name, module, None, f"sys.modules[{name!r}]")
            for name, module in list(sys.modules.items())
            if name != "__main__"
        ]
        self.classes = [(name, owner, set(vars(owner))) for name, owner in _owners() if isinstance(owner, type)]
        self.present = self._present()

    def replaced(self) -> dict[str, tuple[object, str]]:
        """Full name -> (owner, attribute) of what is no longer what it was."""
        if self.present.unchanged():
            return {}
        functions: dict[str, tuple[object, str]] = {}
        for owner, attribute, value, body, name in self.functions:
            now = vars(owner).get(attribute)
            if owner is self.modules and now is None:
                continue  # it is imported again
            if now is not value and not _of_a_library(now) or body is not None and not _same(_body(value), body):
                functions[name] = owner, attribute
        for name, owner, attributes in self.classes:
            for attribute in vars(owner).keys() - attributes:
                bases = owner.__mro__[1:-1] if attribute.startswith("__") else owner.__mro__[1:]  # not `object`
                if any(attribute in vars(base) for base in bases) and not _of_a_library(vars(owner)[attribute]):
                    functions[f"{name}.{attribute}"] = owner, attribute
        if not functions:  # what a library replaced is no longer looked at one by one
            self.present = self._present()
        return functions

    def _present(self) -> _Present:
        return _Present(
            [(owner, attribute) for owner, attribute, *_ in self.functions],
            [(getattr(value, "__func__", value), body) for _, _, value, body, _ in self.functions if body is not None],
            [owner for _, owner, _ in self.classes],
        )

    def restore(self, names: set[str]) -> None:
        """Puts back what these names stood for."""
        before = {name: (owner, attribute, value, body) for owner, attribute, value, body, name in self.functions}
        for name, (owner, attribute) in self.replaced().items():
            if name not in names:
                continue
            if name not in before:  # it hid what a base class has
                delattr(owner, attribute)
                continue
            _, _, value, body = before[name]
            for part, known in zip(_PARTS, body or (), strict=False):
                setattr(getattr(value, "__func__", value), part, known)
            setattr(owner, attribute, value)


class _Modules:
    """The modules of this process as attributes."""

    def __init__(self) -> None:
        self.__dict__ = sys.modules


def _owners() -> Iterator[tuple[str, object]]:
    """Modules and classes of torch, Python and the assay, by name."""
    for name in _OWNERS:
        parent, _, attribute = name.rpartition(".")
        if sys.modules.get(name) is not None:  # None forbids an import
            yield name, sys.modules[name]
        elif hasattr(sys.modules.get(parent), attribute):
            yield name, getattr(sys.modules[parent], attribute)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _OURS and isinstance(module, types.ModuleType):
            yield name, module
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{attribute}", value


def _body(value: object) -> tuple[Any, ...] | None:
    """Code and defaults of a function or a method; None for what has none, such as a class or a C function."""
    method = isinstance(value, staticmethod | classmethod | types.MethodType)
    function: object = value.__func__ if method else value  # type: ignore[attr-defined]
    return tuple(getattr(function, part) for part in _PARTS) if isinstance(function, types.FunctionType) else None


def _same(now: tuple[Any, ...] | None, before: tuple[Any, ...]) -> bool:
    return now is not None and all(map(is_, now, before))


def _of_a_library(value: object) -> bool:
    body = _body(value)
    file = vars(value).get("__file__") if isinstance(value, types.ModuleType) else body and body[0].co_filename
    return isinstance(file, str) and any(part in file for part in _LIBRARIES)
