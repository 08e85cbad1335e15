"""The assay: certifies a kernel against its golden, or says on which rung of the ladder it fails, and where.

It imports torch and `core.tracing`, and nothing else of goldsmith. Every public name loads when it is first used.

    declare/    what a user writes: targets, cases, decisions
    execute/    running a candidate: guard bands, settings, Triton's interpreter
    bounds/     proven rounding bounds of the golden's formula
    noise/      the spread of legal summation orders
    golden/     running and checking the golden in float64
    judge/      the verdict ladder, for one tensor and for one case
    probes/     what is tried on a candidate
    checks.py   `check`: every case through every probe
    diagnosis/  from findings to a cause
    nonfinite/  `watch`: where a run's first NaN or Inf came from
    ranks/      candidates that run on several processes
    gate/       candidates that nobody trusts, each in a process of its own
    report/     results as data, text and HTML
    support/    small tools that the others share
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.tracing import TargetError, deciding, stage, storage, tracing
    from .checks import check
    from .declare.case import Case, Make, case
    from .declare.cpp_source import CppSource
    from .declare.decisions import argmax, given, sign, topk
    from .declare.target import Target
    from .diagnosis import Bundle, Cause, Diagnosis, diagnose, load_bundle
    from .diagnosis.report.replay import replay
    from .nonfinite.events import Event, NonFinite
    from .nonfinite.watch import watch
    from .report.check_report import Report
    from .report.results import (
        AssayError,
        ErrorMap,
        Finding,
        Location,
        Note,
        ProbeRun,
        Row,
    )

_MODULES = {
    "..core.tracing": ("TargetError", "deciding", "stage", "storage", "tracing"),
    ".checks": ("check",),
    ".declare.case": ("Case", "Make", "case"),
    ".declare.cpp_source": ("CppSource",),
    ".declare.decisions": ("argmax", "given", "sign", "topk"),
    ".declare.target": ("Target",),
    ".diagnosis": ("Bundle", "Cause", "Diagnosis", "diagnose", "load_bundle", "replay"),
    ".nonfinite.events": ("Event", "NonFinite"),
    ".nonfinite.watch": ("watch",),
    ".report.check_report": ("Report",),
    ".report.results": ("AssayError", "ErrorMap", "Finding", "Location", "Note", "ProbeRun", "Row"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AssayError", "Bundle", "Case", "Cause", "CppSource", "Diagnosis", "ErrorMap", "Event", "Finding", "Location",
    "Make", "NonFinite", "Note", "ProbeRun", "Report", "Row", "Target", "TargetError", "argmax", "case", "check",
    "deciding", "diagnose", "given", "load_bundle", "replay", "sign", "stage", "storage", "topk", "tracing", "watch",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
