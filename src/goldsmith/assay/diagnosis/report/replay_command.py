"""The line that replays a bundle: a command if the target has an importable name, otherwise a Python call."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ...declare.target import Target
from .result import DiagnosisFacts


def command_line(diagnosis: DiagnosisFacts) -> str:
    """`goldsmith diagnose module:name --replay BUNDLE`, or `assay.replay("BUNDLE", target)`."""
    name = None if diagnosis.target is None else importable(diagnosis.target)
    if name is None:
        return f'goldsmith.assay.replay("{diagnosis.bundle}", target)'
    return f"goldsmith diagnose {shlex.quote(name)} --replay {shlex.quote(str(diagnosis.bundle))}"


def importable(target: Target) -> str | None:
    """`package.module:name` of a target that a module holds, directly or in a list (`name#2` is its second entry), or
    None.

    Another process must be able to import that module in the current folder. The program itself counts under the name
    of its file, not as "__main__"; modules that were loaded from a file elsewhere do not count.
    """
    # "__main__" comes last, because importing a program runs it again
    modules = sorted(sys.modules.items(), key=lambda item: item[0] == "__main__")
    for module_name, module in modules:
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            index = _index(value, target)
            if index is None:
                continue
            known = _from_here(module_name, module)
            if known is not None:
                return f"{known}:{name}" + (f"#{index}" if index else "")
    return None


def _index(value: Any, target: Target) -> int | None:
    """0 if `value` is the target (or a list with only the target), its position from 1 in a longer list, otherwise
    None.
    """
    if value is target:
        return 0
    if type(value) not in (list, tuple) or not all(type(v) is Target for v in value):
        return None  # compares exact types: deprecated torch objects warn when asked for __class__
    at = next((n for n, v in enumerate(value, 1) if v is target), None)
    return at if at is None or len(value) > 1 else 0


def _from_here(name: str, module: ModuleType) -> str | None:
    """The name under which another process can import the module from the current folder, or None."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file)
    if name == "__main__":
        spec = getattr(module, "__spec__", None)
        name = spec.name if spec is not None else path.stem
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    own = Path(*parts)
    beneath = [Path.cwd(), *(Path(p) for p in sys.path if "-packages" in p)]
    fits = (root / own.with_suffix(".py") == path or root / own / "__init__.py" == path for root in beneath)
    return name if any(fits) else None
