"""Loads a candidate from its source, in its own process."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...declare.binding import signature_of
from .candidate_side import Parts

ENTRIES = ("candidate", "ModelNew")  # names that are looked for if no entry is named


class Refusal(Exception):
    """A source from which no candidate can be made; the text says why."""


def python(source: str, name: str, entry: str, construct: Mapping[str, Any] | None) -> Parts:
    """The candidate that Python source defines: a function, an autograd.Function, or a module class to construct."""
    module = _module(source, name)
    found = next((n for n in ([entry] if entry else ENTRIES) if hasattr(module, n)), None)
    if found is None:
        raise Refusal(f"it defines no {entry or ' and no '.join(ENTRIES)}")
    value = getattr(module, found)
    if not callable(value):
        raise Refusal(f"{found} is of type {type(value).__name__}, not a function")
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        value = _constructed(value, construct or {})
    backward = getattr(module, "backward", None)
    reset = getattr(module, "reset", None)
    return Parts(value, backward if callable(backward) else None, reset if callable(reset) else None)


def _module(source: str, name: str) -> ModuleType:
    """Imports the source from a file in the current folder, because Triton and tracebacks read the file."""
    word = re.sub(r"\W", "_", Path(name).stem) or "kernel"
    path = Path.cwd() / f"{word}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(word, path)
    if spec is None or spec.loader is None:
        raise Refusal("Python cannot import it")
    module = importlib.util.module_from_spec(spec)
    if word not in sys.modules:  # a candidate named torch must not stand for torch
        sys.modules[word] = module
    spec.loader.exec_module(module)
    return module


def _constructed(kind: type[torch.nn.Module], how: Mapping[str, Any]) -> torch.nn.Module:
    """An instance, with weights copied by name; the others are drawn from the same seed as the golden's."""
    if "seed" in how:
        torch.manual_seed(how["seed"])
    module = kind(*how.get("args", ()), **how.get("kwargs", {}))
    if "dtype" in how:
        module = module.to(how["dtype"])
    if "device" in how:
        module = module.to(how["device"])
    own = module.state_dict()
    weights = {n: t for n, t in how.get("state", {}).items() if n in own and own[n].shape == t.shape}
    module.load_state_dict(weights, strict=False)
    return module.train(bool(how.get("training", False)))


def parameters_of(parts: Parts) -> dict[str, list[tuple[str, str, bool]] | None]:
    """Function -> its parameters as (name, kind, whether it has a default); None if the signature is unreadable."""
    described: dict[str, list[tuple[str, str, bool]] | None] = {}
    for name in ("candidate", "backward"):
        function = getattr(parts, name)
        if function is not None:
            known = signature_of(function)[1]
            described[name] = (
                known if known is None else [(p.name, p.kind.name, p.default is not p.empty) for p in known]
            )
    return described


def stand_in(parameters: list[tuple[str, str, bool]] | None, name: str) -> Any:
    """A callable with these parameters, for a target whose candidate is in another process."""

    def elsewhere(*args: object, **named: object) -> object:
        raise RuntimeError("this candidate runs in another process")

    elsewhere.__name__ = elsewhere.__qualname__ = name
    if parameters is not None:
        kinds = {k.name: k for k in inspect._ParameterKind}
        elsewhere.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(n, kinds[kind], default=None if optional else inspect.Parameter.empty)
                for n, kind, optional in parameters
            ]
        )
    return elsewhere
