"""source_module: the module of a Python file as the file is now."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class UncachedLoader(SourceFileLoader):
    """Compiles the file each time.

    Python takes its bytecode for current if the file's size and its time in whole seconds are the same, so a file that
    is edited and imported twice in a second may be imported as it was.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def source_module(name: str, path: Path) -> tuple[ModuleType, Callable[[], None]]:
    """(module that has not run yet, what runs it)"""
    loader = UncachedLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"Python cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    return module, lambda: loader.exec_module(module)
