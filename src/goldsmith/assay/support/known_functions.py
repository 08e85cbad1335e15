"""KnownFunctions: the functions of torch, Python and the assay as they were, to see what a candidate has replaced."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any

_OURS = "goldsmith"
_OWNERS = (
    "torch", "torch.Tensor", "torch.nn.functional", "torch.autograd", "torch.cuda", "torch.testing", "torch.linalg",
    "torch.utils._python_dispatch", "torch.autograd.Function", "torch.nn.Module", "time", "random", "builtins", "gc",
    "os", "threading", "socket.socket", "json", "struct", "math", "statistics", "inspect",
    "numpy", "numpy.testing",
)  # fmt: skip
_code_of = attrgetter("__code__")
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", f"{os.sep}torch{os.sep}")


class _Present:
    """What names stand for, compared by identity and without a loop over names in Python."""

    def __init__(
        self, attributes: list[tuple[Any, str]], functions: list[tuple[Any, Any]], classes: list[type]
    ) -> None:
        names = dict[int, tuple[Any, list[str]]]()
        for owner, name in attributes:
            names.setdefault(id(owner), (vars(owner).get, []))[1].append(name)
        self.owners = [(get, known, list(map(get, known))) for get, known in names.values()]
        self.functions, self.codes = [f for f, _ in functions], [code for _, code in functions]
        self.keys = [(vars(owner).keys(), set(vars(owner))) for owner in classes]

    def unchanged(self) -> bool:
        return (
            all(all(map(is_, map(get, names), values)) for get, names, values in self.owners)
            and all(map(is_, map(_code_of, self.functions), self.codes))
            and all(now == known for now, known in self.keys)
        )


class KnownFunctions:
    """Made before the code that may replace something; a library that replaces torch's functions is no candidate."""

    def __init__(self) -> None:
        self.functions = [
            (owner, attribute, value, _code(value), f"{name}.{attribute}")
            for name, owner in _owners()
            for attribute, value in list(vars(owner).items())
            if callable(value) or isinstance(value, staticmethod | classmethod | property)
        ]
        self.classes = [(name, owner, set(vars(owner))) for name, owner in _owners() if isinstance(owner, type)]
        self.present = self._present()

    def replaced(self) -> dict[str, tuple[object, str]]:
        """Full name -> (owner, attribute) of what is no longer what it was."""
        if self.present.unchanged():
            return {}
        functions: dict[str, tuple[object, str]] = {}
        for owner, attribute, value, code, name in self.functions:
            now = vars(owner).get(attribute)
            if now is not value and not _of_a_library(now) or code is not None and _code(value) is not code:
                functions[name] = owner, attribute
        for name, owner, attributes in self.classes:
            for attribute in vars(owner).keys() - attributes:
                if any(attribute in vars(base) for base in owner.__mro__[1:]) and not attribute.startswith("__"):
                    functions[f"{name}.{attribute}"] = owner, attribute
        if not functions:  # what a library replaced is no longer looked at one by one
            self.present = self._present()
        return functions

    def _present(self) -> _Present:
        return _Present(
            [(owner, attribute) for owner, attribute, *_ in self.functions],
            [(getattr(value, "__func__", value), code) for _, _, value, code, _ in self.functions if code is not None],
            [owner for _, owner, _ in self.classes],
        )

    def restore(self, names: set[str]) -> None:
        """Puts back what these names stood for."""
        before = {name: (owner, attribute, value, code) for owner, attribute, value, code, name in self.functions}
        for name, (owner, attribute) in self.replaced().items():
            if name not in names:
                continue
            if name not in before:  # it hid what a base class has
                delattr(owner, attribute)
                continue
            _, _, value, code = before[name]
            if code is not None:
                getattr(value, "__func__", value).__code__ = code
            setattr(owner, attribute, value)


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


def _code(value: object) -> Any:
    """The code of a function or a method; None for what has none, such as a class or a C function."""
    if isinstance(value, types.FunctionType):
        return value.__code__
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _of_a_library(value: object) -> bool:
    code = _code(value)
    return code is not None and any(part in code.co_filename for part in _LIBRARIES)
