"""Loads a candidate from edited copies of the user's modules, in a child process: the files stay as they are."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

import torch

from ....declare.cpp_source import use_folder
from ....declare.target import Target
from ....gate.isolation.candidate_side import Parts
from ....support.random_state import seeded_generators
from .returned_gradients import Misfit, watch


class EditedModules(MetaPathFinder, Loader):
    """Imports the user's modules from texts. `inspect`, through which Triton reads a kernel, sees the edited lines."""

    def __init__(self, modules: Mapping[str, str]):
        self.modules = dict(modules)
        self.codes: dict[str, CodeType] = {}
        self.edited: dict[str, str] = {}
        self.misfits: set[Misfit] = set()  # gradients since the last load that autograd sums, broadcasts or casts
        self.count = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        file = self.modules.get(name)
        if file is None:
            return None
        package = Path(file).name == "__init__.py"
        return importlib.util.spec_from_file_location(
            name, file, loader=self, submodule_search_locations=[str(Path(file).parent)] if package else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        file = self.modules[module.__name__]
        text = self.edited.get(file)
        if text is not None:
            code = compile(text, self._lines_of(file, text), "exec", dont_inherit=True)
        elif file in self.codes:
            code = self.codes[file]
        else:
            code = self.codes[file] = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
        exec(code, module.__dict__)

    def _lines_of(self, file: str, text: str) -> str:
        """The name of an edited text, under which tracebacks and Triton find its lines."""
        linecache.cache.pop(f"{file}.edit{self.count}", None)
        self.count += 1
        name = f"{file}.edit{self.count}"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return name

    def load(self, edited: Mapping[str, str], origin: Sequence[object], backward: str) -> Parts:
        """The candidate, after all of the user's modules were imported again. edited: file -> its text."""
        self.edited = dict(edited)
        for name in self.modules:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        module_name, attribute, index = origin
        with seeded_generators(0, torch.device("cpu")):
            module = importlib.import_module(str(module_name))
        self.misfits = set()
        watch((sys.modules[n] for n in self.modules if n in sys.modules), self.misfits)
        value = _attribute(module, str(attribute))
        value = value[index] if isinstance(index, int) else value  # type: ignore[index]
        if isinstance(value, Target) and value.source is not None:
            return Parts(*value.source.parts(edited), value.reset)
        if isinstance(value, Target):
            return Parts(value.candidate, value.backward if callable(value.backward) else None, value.reset)
        return Parts(value, _attribute(module, backward) if backward else None)  # type: ignore[arg-type]


def _attribute(value: object, name: str) -> object:
    for part in name.split("."):
        value = getattr(value, part)
    return value


def install(modules: Mapping[str, str], libraries: str = "") -> EditedModules:
    """The finder, first in line, in this process. libraries: the folder of those of C++ sources."""
    use_folder(libraries)
    finder = EditedModules(modules)
    sys.meta_path.insert(0, finder)
    return finder


def load(
    modules: Mapping[str, str], edited: Mapping[str, str], origin: Sequence[object], backward: str, libraries: str = ""
) -> Parts:
    """The candidate of edited files: the loader of a candidate's process."""
    for finder in [f for f in sys.meta_path if isinstance(f, EditedModules)]:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)
    return install(modules, libraries).load(edited, origin, backward)
