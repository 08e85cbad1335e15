"""goldsmith.assay: certifies a kernel against its golden, or says on which rung of the ladder it fails, and where.

Imports torch alone, and nothing else of ours.
"""

from .case import Case, Make, case
from .check import check
from .decisions import argmax, given, sign, topk
from .diagnosis import Bundle, Cause, Diagnosis, diagnose, load_bundle, replay
from .golden import deciding, storage
from .results import AssayError, ErrorMap, Finding, Location, Note, ProbeRun, Report, Row, TargetError
from .stage import stage, tracing
from .target import Target
from .watch import watch
from .watch_facts import Event, NonFinite

__all__ = [
    "AssayError", "Bundle", "Case", "Cause", "Diagnosis", "ErrorMap", "Event", "Finding", "Location", "Make",
    "NonFinite", "Note", "ProbeRun", "Report", "Row", "Target", "TargetError", "argmax", "case", "check", "deciding",
    "diagnose", "given", "load_bundle", "replay", "sign", "stage", "storage", "topk", "tracing", "watch",
]  # fmt: skip
