"""A plain Python file as a problem: `golden(...)`, `cases`, and if you like `dtypes`, `outputs`, `backward` and others.

A file may also define `problem`, an `assay.gate.Problem`, or targets (`assay.Target`), of which `file.py:name` names
one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...declare.target import Target
from ..bad_problem import BadProblem
from ..candidate_call import CandidateCall
from ..problem import Problem

SETTINGS = (
    "dtypes", "outputs", "saved", "backward", "golden_backward", "grads", "surrogate", "decisions", "stored",
    "segments", "compute", "dot", "formula", "layouts", "mutates", "holds_nan", "finite", "wants_kernel",
)  # fmt: skip


def read(module: ModuleType, wanted: str | None, name: str) -> Problem:
    """The problem of a module that has been imported; `wanted` is the object's name, or None for the only one."""
    if wanted is not None:
        if not hasattr(module, wanted):
            raise BadProblem(f"{name}: the file defines no {wanted!r}")
        return of_object(getattr(module, wanted), wanted, f"{name}:{wanted}")
    if hasattr(module, "golden"):
        return _of_names(module, name)
    objects = {n: value for n, value in vars(module).items() if isinstance(value, Problem | Target)}
    if len({id(value) for value in objects.values()}) == 1:
        key, value = next(iter(objects.items()))
        return of_object(value, key, name)
    if objects:
        raise BadProblem(
            f"{name}: the file has several problems, name one: {', '.join(f'{name}:{n}' for n in objects)}"
        )
    raise BadProblem(
        f"{name}: not a problem. A file needs golden(...) and cases, or Model, get_inputs and get_init_inputs as in "
        f"KernelBench, or an assay.gate.Problem"
    )


def of_object(value: object, key: str, name: str) -> Problem:
    if isinstance(value, Problem):
        return value
    if isinstance(value, Target):
        return Problem.of(value, construct=_construct(value.golden))
    raise BadProblem(f"{name}: {key!r} is a {type(value).__name__}, expected an assay.gate.Problem or an assay.Target")


def _of_names(module: ModuleType, name: str) -> Problem:
    golden = module.golden
    if not callable(golden):
        raise BadProblem(f"{name}: golden is a {type(golden).__name__}, expected a function")
    cases = getattr(module, "cases", None)
    if cases is None or (isinstance(cases, list | tuple | Mapping) and not cases):
        raise BadProblem(
            f"{name}: the problem has no cases. Define `cases`, an @assay.case function or a dict of tensors"
        )
    settings: dict[str, Any] = {s: getattr(module, s) for s in SETTINGS if hasattr(module, s)}
    if isinstance(settings.get("outputs"), str):
        settings["outputs"] = (settings["outputs"],)
    try:
        return Problem(golden, cases, name=module.__name__, construct=_construct(golden), **settings)
    except (TypeError, ValueError) as error:
        raise BadProblem(f"{name}: {error}") from error


def _construct(golden: Callable[..., object]) -> dict[str, object]:
    return CandidateCall(order=_parameters(golden)).to_data()


def _parameters(golden: Callable[..., object]) -> tuple[str, ...]:
    """Parameter names of the golden. A candidate without a readable signature gets its arguments in this order."""
    try:
        parameters = inspect.signature(golden).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    return tuple(named) if len(named) == len(list(parameters)) else ()
