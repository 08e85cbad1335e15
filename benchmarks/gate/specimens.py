"""Problems and candidates in files: finds them, reads their constants without importing, and builds targets.

    problems/NAME.py              golden and cases, or Model, get_inputs and get_init_inputs as in KernelBench
    cheats/AUTHOR/NAME.py         a candidate that a judge must not accept
    right/AUTHOR/NAME.py          a candidate that a judge must accept

A problem may hold any other argument of `assay.Target` under that argument's name. A candidate holds PROBLEM, STATUS,
REASONS and, where another status is right as well, ALSO. KERNEL_ASKED means that its problem forbids plain torch. NEEDS
names what it cannot run without: packages, or "cuda" for a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from goldsmith import assay

HERE = Path(__file__).parent
PROBLEMS, CHEATS, RIGHT = HERE / "problems", HERE / "cheats", HERE / "right"
ACCEPTED = "accepted"
DECLARED = {f.name for f in fields(assay.Target) if f.init} - {"candidate", "golden", "cases", "name"}

_numbers = itertools.count()


@dataclass(frozen=True)
class Specimen:
    """A candidate's file and what a judge should say about it.

    statuses      acceptable statuses, the best first
    reasons       acceptable reasons of a verdict "cheating"
    kernel_asked  the judge's policy against plain torch is on
    needs         packages, or "cuda"
    """

    path: Path
    problem: str
    statuses: tuple[str, ...]
    reasons: frozenset[str]
    kernel_asked: bool
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def text(self) -> str:
        return ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""

    def missing(self, device: str = "cpu") -> list[str]:
        """What it needs and is not here, or not on that device."""
        packages = [name for name in self.needs if name != "cuda" and importlib.util.find_spec(name) is None]
        return packages + ["cuda"] * ("cuda" in self.needs and device != "cuda")


def specimens(folder: Path) -> list[Specimen]:
    """The candidates of all authors in CHEATS or RIGHT."""
    return [read(path) for path in sorted(folder.glob("*/*.py"))]


def read(path: Path) -> Specimen:
    """The constants of a candidate's file. The file is parsed only, because an import already runs the candidate."""
    constants: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            if node.targets[0].id in ("PROBLEM", "STATUS", "REASONS", "ALSO", "KERNEL_ASKED", "NEEDS"):
                constants[node.targets[0].id] = ast.literal_eval(node.value)
    return Specimen(
        path,
        constants["PROBLEM"],
        (constants["STATUS"], *sorted(constants.get("ALSO", ()))),
        frozenset(constants.get("REASONS", ())),
        constants.get("KERNEL_ASKED", False),
        tuple(constants.get("NEEDS", ())),
    )


def load(path: Path) -> ModuleType:
    """A new module from a file; no two loads share one."""
    spec = importlib.util.spec_from_file_location(f"specimen_{next(_numbers)}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def target(specimen: Specimen) -> assay.Target:
    """The target that a problem and a candidate make together; runs the candidate's module."""
    problem, candidate = load(PROBLEMS / f"{specimen.problem}.py"), load(specimen.path)
    declared = {name: getattr(problem, name) for name in DECLARED if hasattr(problem, name)}
    if hasattr(problem, "Model"):
        golden, kernel, cases = _modules(problem, candidate)
    else:
        golden, kernel, cases = problem.golden, candidate.candidate, problem.cases
    return assay.Target(kernel, golden, cases=cases, name=specimen.path.stem, **declared)


def _modules(problem: ModuleType, candidate: ModuleType) -> tuple[Callable, Callable, list]:
    """KernelBench's Model and ModelNew as functions of the inputs and the weights; weights are copied by name."""
    names = list(inspect.signature(problem.Model.forward).parameters)[1:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [module(*problem.get_init_inputs()) for module in (problem.Model, candidate.ModelNew)]
    models[1].load_state_dict(models[0].state_dict())
    weights = {name: weight.detach() for name, weight in models[0].state_dict().items()}

    def function(model: torch.nn.Module) -> Callable:
        def call(*values: Any) -> Any:
            given = dict(zip(weights, values[len(names) :]))
            return torch.func.functional_call(model, given, values[: len(names)])

        return call

    def draw(make: assay.Make) -> dict[str, Any]:
        inputs = [v.to(make.device, make.dtype) if v.is_floating_point() else v for v in problem.get_inputs()]
        moved = {name.replace(".", "_"): weight.to(make.device, make.dtype) for name, weight in weights.items()}
        return dict(zip(names, inputs, strict=True)) | moved

    draw.__name__ = "inputs"
    return function(models[0]), function(models[1]), assay.case()(draw)
