"""KnownModules: what every name of every loaded module and of its classes stands for, and whether it still does.

Functions, classes, methods and other descriptors count, and not data, which caches fill. There are 80,000 of them. Only
where the words of a namespace differ, or where this Python has another layout, is it looked at by name.
"""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import object_words
from .object_words import PARTS

_OURS = "goldsmith"
_OUR_FOLDER = os.sep + os.path.join("goldsmith", "")
_REWRITTEN = "triton.language"  # Triton's interpreter puts functions of its own and of Python there
SET_BY_TORCH = ("torch.Storage",)  # set_default_dtype replaces it
_IMMUTABLE = 1 << 8  # flag of classes whose attributes cannot be set
_KINDS = (
    staticmethod, classmethod, property, types.GetSetDescriptorType, types.MemberDescriptorType, types.ModuleType,
)  # fmt: skip
_WRAPPERS = (staticmethod, classmethod, types.MethodType)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__))


class _Namespace(NamedTuple):
    """values: those that count; names: all, where a new name can hide something (a base class's, or a lazy one)."""

    name: str
    values: dict[str, Any]
    known: dict[str, Any]
    names: frozenset[str] | None


class KnownModules:
    """Made before the code that may replace something; what a library or the assay puts there is lawful."""

    def __init__(self) -> None:
        self.spaces = list(_namespaces())
        known = [value for space in self.spaces for value in space.known.values()]
        functions = {id(f): f for value in known for f in _functions(value)}
        self.functions = list(functions.values())
        self.parts = [tuple(getattr(f, part) for part in PARTS) for f in self.functions]
        cells = (cell for f in self.functions for cell in f.__closure__ or ())
        self.cells = [cell for cell in cells if isinstance(_content(cell), types.FunctionType)]
        self.contents = list(map(_content, self.cells))
        self.ids = frozenset(map(id, known))
        self.modules = frozenset(sys.modules)
        self.tags = object_words.of_dicts([space.values for space in self.spaces])
        self.part_words = object_words.of_functions(self.functions)
        self.cell_words = object_words.of_cells(self.cells)

    def replaced(self, own: str) -> list[str]:
        """Full names of what is no longer what it was; own: the folder of the candidate's files."""
        names = [name for number in self.tags.changed() for name in self._differences(self.spaces[number], own)]
        changed = [self.functions[n] for n in self.part_words.changed() if not self._same_parts(n)]
        changed += [
            function
            for number in self.cell_words.changed()
            if not self._lawful(_content(self.cells[number]), self.contents[number])
            for function in self.functions
            if self.cells[number] in (function.__closure__ or ())
        ]
        names += [f"{f.__module__}.{f.__qualname__}" for f in changed]
        for name, module in list(sys.modules.items()):
            if name not in self.modules and isinstance(module, types.ModuleType) and _in_library(_file(module)):
                for space in _of_module(name, module, set()):
                    names += [f"{space.name}.{n}" for n, v in space.known.items() if _is_own(v, own)]
        return names

    def _differences(self, space: _Namespace, own: str) -> Iterator[str]:
        rewritten = space.name.startswith(_REWRITTEN)
        for name, value in space.known.items():
            now = value if f"{space.name}.{name}" in SET_BY_TORCH else space.values.get(name, value)
            if now is not value and _is_own(now, own) or not rewritten and not self._lawful(now, value):
                yield f"{space.name}.{name}"
        for name in space.values.keys() - space.names if space.names is not None else ():
            if not name.startswith("_") and self._hides(space.values[name], own):
                yield f"{space.name}.{name}"

    def _hides(self, value: object, own: str) -> bool:
        """Whether a new name was put there by the candidate: its function, another known one, or a constant."""
        return _is_own(value, own) or id(value) in self.ids or value is None or type(value) in (bool, int, float)

    def _same_parts(self, number: int) -> bool:
        now = (getattr(self.functions[number], part) for part in PARTS)
        return all(a is b for a, b in zip(now, self.parts[number], strict=True))

    def _lawful(self, now: object, before: object) -> bool:
        """Whether it is the same, or a new function or class of a library, such as one that replaces a stub."""
        if now is before:
            return True
        if id(now) in self.ids:
            return False
        files = [f.__code__.co_filename for f in _functions(now)]
        if not files:
            files = [_file(now if isinstance(now, types.ModuleType) else sys.modules.get(type(now).__module__))]
        return all(map(_in_library, files))


def _namespaces() -> Iterator[_Namespace]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in (_OURS, "__main__") and isinstance(module, types.ModuleType):
            yield from _of_module(name, module, seen)


def _of_module(name: str, module: types.ModuleType, seen: set[int]) -> Iterator[_Namespace]:
    """A module, its classes, and modules that only it knows, such as the namespaces of torch's operators."""
    if id(module) in seen:
        return
    seen.add(id(module))
    values = vars(module)
    lazy = type(module) is not types.ModuleType or "__getattr__" in values
    yield _namespace(name, values, lazy=lazy)
    for attribute, value in list(values.items()):
        if issubclass(type(value), type):
            if vars(value).get("__module__") == name:
                yield from _of_class(f"{name}.{attribute}", value, seen)
        elif issubclass(type(value), types.ModuleType) and type(value) is not types.ModuleType:
            yield from _of_module(f"{name}.{attribute}", value, seen)


def _of_class(name: str, kind: type, seen: set[int]) -> Iterator[_Namespace]:
    if id(kind) in seen or kind.__flags__ & _IMMUTABLE:
        return
    seen.add(id(kind))
    values = namespace(kind)
    if values is None:
        return
    yield _namespace(name, values, lazy=True)
    for attribute, value in list(values.items()):
        if issubclass(type(value), type) and vars(value).get("__module__") == values.get("__module__"):
            yield from _of_class(f"{name}.{attribute}", value, seen)


def namespace(owner: object) -> dict[str, Any] | None:
    """The dict of a module, or the one behind the proxy of a class."""
    values = vars(owner)
    return values if isinstance(values, dict) else next((r for r in gc.get_referents(values) if type(r) is dict), None)


def _namespace(name: str, values: dict[str, Any], *, lazy: bool) -> _Namespace:
    return _Namespace(
        name, values, {n: v for n, v in values.items() if _counts(v)}, frozenset(values) if lazy else None
    )


def _counts(value: object) -> bool:
    return callable(value) or issubclass(type(value), _KINDS)


def _functions(value: object) -> list[types.FunctionType]:
    """Python functions that a name stands for."""
    if type(value) is property:
        parts: tuple[object, ...] = (value.fget, value.fset, value.fdel)
    else:
        parts = (value.__func__ if type(value) in _WRAPPERS else value,)  # type: ignore[attr-defined]
    return [part for part in parts if type(part) is types.FunctionType]


def _is_own(value: object, own: str) -> bool:
    return any(f.__code__.co_filename.startswith(own) for f in _functions(value))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _file(module: object) -> str:
    file: object = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
    return file if isinstance(file, str) else ""


def _in_library(file: str) -> bool:
    return file.startswith("<frozen") or _OUR_FOLDER in file or any(part in file for part in _LIBRARIES)
