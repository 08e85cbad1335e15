"""Makes fresh targets from the copy of a host, in the child process."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .catalogue import Fault, Host

_NUMBER = itertools.count()


def factory(host: Host, backend: str, path: Path) -> Callable[[], Any]:
    """A function that makes the target.

    It loads a specimen's module anew each time, because kernels may keep state, which may be their fault. An operator
    of goldsmith is imported once from the copied package, before any other import of goldsmith.
    """
    if host.package:
        return lambda: _shipped(host, backend)
    return lambda: _module(path).target()


def failing(fault: Fault, path: Path) -> tuple[Any, Any, Any]:
    """The target of a fault, the report of its first check that does not pass, and that check's examinations."""
    import torch  # an operator of goldsmith is imported from the copied package, before any other import

    from goldsmith.assay import probes
    from goldsmith.assay.checks import examine

    torch.set_num_threads(1)
    target = factory(fault.host, fault.backend, path)()
    cases = [c for c in target.cases if not fault.cases or c.name in fault.cases]
    dtype = getattr(torch, fault.dtype) if fault.dtype else None
    for selected in (frozenset(probes.QUICK), probes.select("all")):
        report, examinations = examine(target, cases, dtype, "cpu", 0, selected, 60.0, until_failing=True)
        if report.verdict != "pass":
            break
    return target, report, examinations


def _module(path: Path) -> Any:
    name = f"kernelfault_host_{next(_NUMBER)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks up functions by their module
    spec.loader.exec_module(module)
    return module


def _shipped(host: Host, backend: str) -> Any:
    """The operator on this backend in float32, on the cases that the host names."""
    import torch

    from goldsmith.cli.targets import op_target

    target = op_target(operator(host), backend, dtype=torch.float32)
    chosen = [target.case(name) for name in host.cases]
    return dataclasses.replace(target, cases=chosen)


def operator(host: Host) -> Any:
    """The host's operator."""
    import goldsmith

    return goldsmith.Op.all()[host.package.removeprefix("goldsmith.")]
