"""Targets of the user's own: from a module or a Python file, one by name or all that it defines."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from ..assay.declare.problem_steps import step
from ..assay.declare.source_module import source_module
from ..assay.declare.target import Target
from ..assay.support.random_state import seeded_generators
from ..core.tracing import TargetError

FORMS = "module:target, path/to/file.py:target, or a module or file alone for all of its targets"


class UnknownName(ValueError):
    """A name that is neither an operator, a family nor a target; the text lists what exists."""


def names_a_target(name: str) -> bool:
    """Whether the name has the form of a user's target or file; a module's name alone may be an operator's."""
    return ":" in name or is_file(name)


def is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def is_module(name: str) -> bool:
    """Whether a dotted name can be imported, here or installed; a folder without __init__.py cannot."""
    _import_from_here()
    try:
        with step("its import"):  # of the package around it
            spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None
    except Exception:  # noqa: BLE001  a parent package may raise anything on import; load_targets reports it
        parent = name.rpartition(".")[0]
        return bool(parent) and is_module(parent)


def all_targets(name: str) -> list[str]:
    """Every target that a module or a file defines, as `name:attribute`; each object once, lists of targets too."""
    module = _module(name, name)
    sources, seen = [], set[int]()
    for attribute, value in vars(module).items():
        targets = value if isinstance(value, list | tuple) else [value]
        if not targets or not all(isinstance(target, Target) for target in targets):
            continue
        if not seen.issuperset(map(id, targets)):
            sources.append(f"{name}:{attribute}")
        seen.update(map(id, targets))
    if not sources:
        raise UnknownName(f"{name} defines no assay.Target. `goldsmith new NAME` writes a file that has one.")
    return sources


def load_targets(name: str) -> list[Target]:
    """The targets of `module:attribute` or `file.py:attribute`; modules in the current directory can be imported."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise UnknownName(f"{name!r}: name a target of your own as {FORMS}.")
    module = _module(module_name, name)
    try:
        value: object = module
        for part in attribute.split("."):
            value = getattr(value, part)
    except AttributeError:
        known = sorted(k for k, v in vars(module).items() if isinstance(v, Target))
        there = f"its targets are: {', '.join(known)}" if known else "it defines no assay.Target"
        raise UnknownName(f"{module_name} has no {attribute!r}; {there}.") from None
    values = list(value) if isinstance(value, list | tuple) else [value]
    targets = [v for v in values if isinstance(v, Target)]
    if len(targets) < len(values) or not values:
        others = [type(v).__name__ for v in values if not isinstance(v, Target)]
        kind = f"an object of type {others[0]}" if others else "an empty list"
        raise UnknownName(f"{name} is {kind}; expected a goldsmith.assay.Target or a list of them.")
    return [_named(target, name, number if len(targets) > 1 else 0) for number, target in enumerate(targets, 1)]


def _named(target: Target, source: str, number: int) -> Target:
    """`target`, named as the user typed it if neither it nor its candidate has a useful name."""
    if not target.nameless:
        return target
    return replace(target, name=f"{source}#{number}" if number else source)


# import


def _module(module_name: str, name: str) -> ModuleType:
    """The imported module or file; UnknownName says in the user's terms why it cannot be imported."""
    _import_from_here()
    path = Path(module_name)
    if is_file(module_name) and (path.suffix != ".py" or not path.is_file()):
        raise UnknownName(_no_file(module_name, path))
    try:
        # a target may hold tensors that its module drew
        with seeded_generators(0, torch.device("cpu")), step("its import"):
            return _import_file(path) if is_file(module_name) else importlib.import_module(module_name)
    except TargetError as error:
        raise UnknownName(f"{name}: a target declaration is wrong{_declaration_place(error)}: {error}") from error
    except Exception as error:  # a user's module may raise anything on import, and its author needs to see what
        raise UnknownName(_import_failed(name, module_name, error)) from error


def _import_from_here() -> None:
    if "" not in sys.path:
        sys.path.insert(0, "")


def _no_file(name: str, path: Path) -> str:
    if path.is_dir():
        return f"{name} is a folder; name one of its files, as {name.rstrip('/')}/FILE.py."
    if path.suffix == ".py":
        return f"there is no file {name}."
    hint = f"; is it {name}.py?" if Path(f"{name}.py").is_file() else "."
    return f"{name} is not a Python file{hint} Name a target of your own as {FORMS}."


def _import_file(path: Path) -> ModuleType:
    """The module of a file, as if imported from the folder above its packages, so that its own imports work."""
    path = path.resolve()
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(1, str(folder))  # after the current directory
    name = ".".join(parts[:-1] if path.stem == "__init__" else parts)
    loaded = sys.modules.get(name)
    if loaded is not None and not _is_from(loaded, path):
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # a file of the same name was first
        loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    if len(parts) > 1:
        importlib.import_module(name.rpartition(".")[0] or name)
    module, run = source_module(name, path)
    sys.modules[name] = module
    try:
        run()
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _is_from(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def _declaration_place(error: BaseException) -> str:
    """File and line of the declaration that raised, in parentheses: a module may declare several targets."""
    lines = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [f"{file}, line {line}" for file, line in lines if not any(part in file for part in _LIBRARY_PATHS)]
    return f" ({own[-1]})" if own else ""


_LIBRARY_PATHS = (
    "<",
    "importlib",
    f"{os.sep}goldsmith{os.sep}assay{os.sep}",
    f"{os.sep}goldsmith{os.sep}cli{os.sep}",
    f"{os.sep}goldsmith{os.sep}core{os.sep}tracing.py",
)


def missing_module(error: ModuleNotFoundError) -> str:
    """What to say where a check needs a module that is not installed, be it goldsmith's or the user's."""
    return (
        f"{error}. Nothing was judged: install it in the environment of this Python ({sys.executable}), or import it "
        "from a folder on its path."
    )


def _import_failed(name: str, module_name: str, error: BaseException) -> str:
    root = module_name.partition(".")[0]
    if not is_file(module_name) and isinstance(error, ModuleNotFoundError) and error.name in (root, module_name):
        file = module_name.replace(".", "/") + ".py"
        return (
            f"{name}: no module {error.name!r} is in the current directory or installed. Run the command from the "
            f"folder that contains it, or name its file, as path/to/{file}."
        )
    where = ""
    trace = error.__traceback__
    if isinstance(error, SyntaxError):  # its text already gives file and line
        trace = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "importlib" not in file and file != __file__:
            where = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{name}: importing {module_name} failed with {type(error).__name__}: {error}{where}"


def numbered(name: str) -> tuple[str, int | None]:
    """(source, number) of `source#2`, the second target of a list; the number is None if there is none."""
    source, mark, number = name.rpartition("#")
    return (source, int(number)) if mark and number.isdecimal() else (name, None)


def one_target(name: str) -> Target:
    """The target that a name stands for; if it stands for several, UnknownName lists them."""
    source, number = numbered(name)
    sources = [source] if ":" in source else all_targets(source)
    targets: Mapping[str, Target] = _by_name(sources)
    if number is not None and 1 <= number <= len(targets):
        return list(targets.values())[number - 1]
    if number is not None or len(targets) > 1:
        listed = ", ".join(f"{key} ({target.name})" for key, target in targets.items())
        raise UnknownName(f"{name}: name one target; there are: {listed}.")
    return next(iter(targets.values()))


def _by_name(sources: list[str]) -> dict[str, Target]:
    """Each target by the name that selects it alone."""
    named: dict[str, Target] = {}
    for source in sources:
        targets = load_targets(source)
        many = len(targets) > 1
        named |= {f"{source}#{k}" if many else source: target for k, target in enumerate(targets, 1)}
    return named
