"""goldsmith.assay: certifies a kernel against its golden, or says on which rung of the ladder it fails, and where.

Imports torch alone, and nothing else of ours.
"""

from .results import AssayError, ErrorMap, Finding, Location, Note, ProbeRun, Report, Row, TargetError
from .stage import stage, tracing

__all__ = [
    "AssayError", "ErrorMap", "Finding", "Location", "Note", "ProbeRun", "Report", "Row", "TargetError",
    "stage", "tracing",
]  # fmt: skip
