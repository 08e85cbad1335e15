"""KnownModules: what every name of every loaded module and of its classes stands for, and whether it still does.

Functions, classes, methods and other descriptors count, and not data, which caches fill. There are 80,000 of them, and
a candidate's process shares their memory with the zygote as long as nothing counts references to them. So namespaces
are compared by the number that CPython changes with a dict, and functions by the addresses of their parts. Only where
these differ, or where this Python has another layout, is a namespace looked at by name.
"""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_char
from typing import Any, NamedTuple

import torch
from torch import Tensor

_OURS = "goldsmith"
_OUR_FOLDER = os.sep + os.path.join("goldsmith", "")
_REWRITTEN = "triton.language"  # Triton's interpreter puts functions of its own and of Python there
_IMMUTABLE = 1 << 8  # flag of classes whose attributes cannot be set
_KINDS = (
    staticmethod, classmethod, property, types.GetSetDescriptorType, types.MemberDescriptorType, types.ModuleType,
)  # fmt: skip
_WRAPPERS = (staticmethod, classmethod, types.MethodType)
_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__closure__")
_WORD = 8  # bytes
_PIECE = 4096
# of this process, from its second word on, because torch takes address 0 for no memory
_MEMORY = torch.frombuffer((c_char * (1 << 47)).from_address(_WORD), dtype=torch.int64)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__))


class _Namespace(NamedTuple):
    """values: those that count; names: all, where a new name can hide something (a base class's, or a lazy one)."""

    name: str
    values: dict[str, Any]
    known: dict[str, Any]
    names: frozenset[str] | None


class _Words:
    """Words in memory, read without touching the objects that hold them."""

    def __init__(self, objects: Sequence[object], offset: int | None, count: int) -> None:
        """offset: of the words in each object; None: unknown, so that all may have changed."""
        self.size, self.places, self.known = len(objects), tuple[Tensor, ...](), list[Tensor]()
        if offset is not None:
            firsts = torch.tensor([_index(o, offset) for o in objects], dtype=torch.int64)
            # in pieces for which torch starts no thread, because the zygote must not have any
            self.places = (firsts.unsqueeze(1) + torch.arange(count)).split(_PIECE)
            self.known = [_MEMORY[place] for place in self.places]

    def changed(self) -> list[int]:
        """Numbers of the objects whose words are others now."""
        if not self.places:
            return list(range(self.size))
        return [
            number * _PIECE + row
            for number, (place, before) in enumerate(zip(self.places, self.known, strict=True))
            if not torch.equal(now := _MEMORY[place], before)
            for row in (now != before).any(1).nonzero().flatten().tolist()
        ]


class KnownModules:
    """Made before the code that may replace something; what a library or the assay puts there is lawful."""

    def __init__(self) -> None:
        self.spaces = list(_namespaces())
        known = [value for space in self.spaces for value in space.known.values()]
        functions = {id(f): f for value in known for f in _functions(value)}
        self.functions = list(functions.values())
        self.parts = [tuple(getattr(f, part) for part in _PARTS) for f in self.functions]
        cells = (cell for f in self.functions for cell in f.__closure__ or ())
        self.cells = [cell for cell in cells if isinstance(_content(cell), types.FunctionType)]
        self.contents = list(map(_content, self.cells))
        self.ids = frozenset(map(id, known))
        self.modules = frozenset(sys.modules)
        self.tags = _Words([space.values for space in self.spaces], _tag_offset(), 1)
        self.part_words = _Words(self.functions, _part_offset(), len(_PARTS))
        self.cell_words = _Words(self.cells, _cell_offset(), 1)

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
            now = space.values.get(name, value)
            if now is not value and _is_own(now, own) or not rewritten and not self._lawful(now, value):
                yield f"{space.name}.{name}"
        for name in space.values.keys() - space.names if space.names is not None else ():
            if not name.startswith("_") and self._hides(space.values[name], own):
                yield f"{space.name}.{name}"

    def _hides(self, value: object, own: str) -> bool:
        """Whether a new name was put there by the candidate: its function, another known one, or a constant."""
        return _is_own(value, own) or id(value) in self.ids or value is None or type(value) in (bool, int, float)

    def _same_parts(self, number: int) -> bool:
        now = (getattr(self.functions[number], part) for part in _PARTS)
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
    values = next((r for r in gc.get_referents(vars(kind)) if isinstance(r, dict)), None)
    if values is None:
        return
    yield _namespace(name, values, lazy=True)
    for attribute, value in list(values.items()):
        if issubclass(type(value), type) and vars(value).get("__module__") == values.get("__module__"):
            yield from _of_class(f"{name}.{attribute}", value, seen)


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


# how this Python lays out its objects, found out with examples


def _word(value: object, offset: int) -> int:
    return int(_MEMORY[_index(value, offset)])


def _index(value: object, offset: int) -> int:
    return (id(value) + offset) // _WORD - 1


def _tag_offset() -> int | None:
    """Where a dict has the number that changes with it: behind its head and its size."""
    offset, example = 3 * _WORD, {"name": object()}
    before = _word(example, offset)
    read = example["name"], _word(example, offset)
    example["name"] = object()
    return offset if before == read[1] != _word(example, offset) and sys.version_info < (3, 13) else None


def _part_offset() -> int | None:
    """Where a function has the addresses of its parts, one after the other."""
    known: Mapping[str, object] = {}

    def example(a: int = 1, *, b: int = 2) -> object:
        return known

    wanted = [id(getattr(example, part)) for part in _PARTS]
    offsets = range(0, object.__sizeof__(example), _WORD)
    return next((o for o in offsets if [_word(example, o + n * _WORD) for n in range(len(wanted))] == wanted), None)


def _cell_offset() -> int | None:
    content = object()
    cell = types.CellType(content)
    return next((o for o in range(0, cell.__sizeof__(), _WORD) if _word(cell, o) == id(content)), None)
