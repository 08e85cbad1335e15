"""load_problem: the problem in a file, whatever its format."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from ....core.tracing import TargetError
from ...declare.problem_steps import step
from ...declare.source_module import source_module
from ..bad_problem import BadProblem
from ..candidate_call import DTYPES
from ..problem import Problem
from . import flashinfer, kernelbench, python_file


@dataclass(frozen=True)
class ProblemSource:
    """Where a problem is and how it is read, as data: each judge reads it for itself.

    where    FILE, FILE:NAME, or a folder that holds one definition
    options  sizes and elements for KernelBench, workloads for FlashInfer-Bench, dtypes and backward for both
    """

    where: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Problem:
        return load_problem(self.where, **self.options)

    def to_json(self) -> dict[str, Any]:
        dtypes = self.options.get("dtypes")
        named = {} if dtypes is None else {"dtypes": [str(d).removeprefix("torch.") for d in dtypes]}
        return {"where": self.where, "options": {**self.options, **named}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        options = dict(data["options"])
        if options.get("dtypes") is not None:
            options["dtypes"] = tuple(DTYPES[name] for name in options["dtypes"])
        return cls(data["where"], options)


def load_problem(where: str | Path, **options: object) -> Problem:
    """The problem in a file: golden and cases, KernelBench's `Model`, or FlashInfer-Bench's Definition.

    where     path/to/file.py, path/to/file.py:name or path/to/definition.json
    sizes     KernelBench: "auto" (smaller ones where the file's own are too large to judge) or "declared"
    elements  KernelBench: the most elements that inputs and weights may have together with sizes="auto"
    workloads FlashInfer-Bench: the JSONL file, if it is not beside the definition
    dtypes    KernelBench: the dtypes of inputs and weights
    backward  "present" (judge the backward of candidates that have one), "auto" or None

    Raises `BadProblem`. A Python file is imported, so read only problems that you trust.
    """
    path, wanted = existing(str(where))
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        problem = _read(path, text, wanted, options)
        return replace(problem, files=tuple(dict.fromkeys([*problem.files, str(path.resolve())])))
    except BadProblem:
        raise
    except (TargetError, TypeError) as error:
        raise BadProblem(f"{path.name}: {error}") from error


def known_format(where: str) -> str:
    """ "kernelbench", "flashinfer" or "python", from the text alone."""
    path, wanted = split(where)
    if path.suffix == ".json":
        return "flashinfer"
    if not path.is_file():
        return "python"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return "python"
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return "kernelbench" if wanted is None and kernelbench.recognised(names) else "python"


def _read(path: Path, text: str, wanted: str | None, options: Mapping[str, Any]) -> Problem:
    name = path.name
    if path.suffix == ".json":
        known = {"workloads", "backward"}
        workloads = options.get("workloads")
        more = {n: v for n, v in _only(options, known, name).items() if n != "workloads"}
        return flashinfer.read(path, text, workloads=None if workloads is None else Path(workloads), **more)
    module = imported(path)
    if wanted is None and kernelbench.recognised(list(vars(module))):
        more = _only(options, {"sizes", "elements", "dtypes", "backward"}, name)
        return kernelbench.read(module, path.stem, text, **more)
    _only(options, set(), name)
    return python_file.read(module, wanted, name)


def _only(options: Mapping[str, object], known: set[str], name: str) -> dict[str, Any]:
    unknown = [n for n in options if n not in known]
    if unknown:
        has = f"it takes {', '.join(sorted(known))}" if known else "its file says everything itself"
        raise BadProblem(f"{name}: the option {unknown[0]!r} does not apply to this problem; {has}")
    return dict(options)


def existing(where: str) -> tuple[Path, str | None]:
    """FILE or FILE:NAME, where there is such a file; raises BadProblem otherwise."""
    path, wanted = split(where)
    if not path.is_file():
        what = "a folder; name one of its files" if path.is_dir() else "no ordinary file"
        raise BadProblem(f"{where}: {what if path.exists() else 'there is no such file'}")
    return path, wanted


def split(where: str) -> tuple[Path, str | None]:
    """FILE or FILE:NAME"""
    path, colon, name = where.rpartition(":")
    if colon and name.isidentifier() and not Path(where).exists():
        return Path(path), name
    return Path(where), None


def imported(path: Path) -> ModuleType:
    """A problem's file as a module; it may import files beside it.

    These come after Python's modules and installed ones, because candidates may lie there, too.
    """
    if path.suffix != ".py":
        raise BadProblem(f"{path.name}: not a Python file or a JSON file")
    module, run = source_module(path.stem, path)
    folder = str(path.resolve().parent)
    sys.path.append(folder)
    try:
        with step("its import"):
            run()
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise BadProblem(f"{path.name} does not parse: {line}{error.msg}") from None
    except ModuleNotFoundError as error:
        raise BadProblem(f"{path.name} needs the package {error.name}, which is not installed here") from error
    except (Exception, SystemExit) as error:
        raise BadProblem(f"{path.name}: importing it raised {type(error).__name__}: {error}") from error
    finally:
        if folder in sys.path:
            sys.path.reverse()
            sys.path.remove(folder)
            sys.path.reverse()
    return module
