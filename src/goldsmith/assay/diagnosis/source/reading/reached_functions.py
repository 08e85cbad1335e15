"""The user's functions that a callable reaches: through globals, closures, classes and Triton kernels."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

_OURS = Path(__file__).resolve().parents[4]
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(str(Path(path).resolve()) for name, path in sysconfig.get_paths().items() if name in _LIBRARIES)
_MOST = 2000  # values to look at


def is_users(path: str | None) -> bool:
    """Whether a file is the user's own: not installed, not part of Python or goldsmith, and there to be read."""
    if not path or not path.endswith(".py") or "-packages" in path:
        return False
    whole = Path(path).resolve()
    return whole.is_file() and not whole.is_relative_to(_OURS) and not str(whole).startswith(_INSTALLED)


def user_modules() -> dict[str, str]:
    """Name -> file of every loaded module of the user's, in the order in which their imports began."""
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return {
        name: str(Path(file).resolve()) for name, file in files if name != "__mp_main__" and file and is_users(file)
    }


def reached(root: object, without: str = "") -> dict[str, set[tuple[int, int]]]:
    """File -> beginnings of the user's functions that `root` reaches; not through functions of the name `without`."""
    begins: dict[str, set[tuple[int, int]]] = {}
    for function in functions(root, without):
        begins.setdefault(str(Path(function.__code__.co_filename).resolve()), set()).add(_begin(function.__code__))
    return begins


def _begin(code: CodeType) -> tuple[int, int]:
    """The line and column where the body of a lambda begins, which may share its line; else the first line and -1."""
    if code.co_name != "<lambda>":
        return code.co_firstlineno, -1
    places = ((row, at) for row, _, at, end in code.co_positions() if row and at is not None and end)
    return min(places, default=(code.co_firstlineno, -1))


def functions(root: object, without: str = "") -> Iterator[FunctionType]:
    """The user's functions that `root` reaches."""
    seen: set[int] = set()
    pending: list[object] = [root]
    kept = []  # so that no id is used twice
    while pending and len(seen) < _MOST:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, FunctionType):
            if value.__name__ == without:
                continue
            wrapped = getattr(value, "__wrapped__", None)
            if is_users(value.__code__.co_filename):
                yield value
                pending += _used(value)
            if wrapped is not None:
                pending.append(wrapped)
        else:
            pending += _parts(value)


def _parts(value: object) -> list[object]:
    """The functions that a callable which is no function stands for."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    owner = getattr(value, "__self__", None)
    if inspect.ismethod(value) or inspect.isbuiltin(value):
        own = [getattr(value, "__func__", None)]
        return own if owner is None or isinstance(owner, ModuleType) else [*own, owner]
    if isinstance(value, type):
        return list(vars(value).values()) if is_users(_file_of(value)) else []
    kernel = getattr(value, "fn", None)  # of triton.jit, autotune and heuristics
    if kernel is not None and type(value).__module__.startswith("triton"):
        return [kernel]
    return [type(value)] if is_users(_file_of(type(value))) else []


def _used(function: FunctionType) -> list[object]:
    values: list[object] = []
    for code in _codes(function.__code__):
        loaded = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        modules = [function.__globals__.get(name) for name in code.co_names if name in loaded]
        values += [v for v in modules if not isinstance(v, ModuleType)]
        for module in (m for m in modules if isinstance(m, ModuleType) and is_users(getattr(m, "__file__", None))):
            values += [vars(module)[name] for name in code.co_names if name in vars(module)]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return values


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _file_of(cls: type) -> str | None:
    module = sys.modules.get(cls.__module__)
    return getattr(module, "__file__", None)
