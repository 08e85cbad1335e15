"""The order in which a report shows findings (serious ones first) and notes (first those that a reader can act on).

It also has the format of numbers.
"""

from __future__ import annotations

import math

from .results import PASS, QUALITY, RUNGS, Finding, Note, ReportFacts

LAYOUTS = "layouts"
# notes that explain a verdict and ask for nothing: reports show how many there are, and on request their texts
OBSERVATIONS = frozenset(
    {
        "cancels", "compute_range", "flushes_subnormals", "formula", "nan_gradient", "nan_spread", "narrow_result",
        "order_nondeterminism", "pattern", "tie",
    }
)  # fmt: skip


def ranked(report: ReportFacts) -> list[Finding]:
    """Findings, the most important first.

    First those about the golden, because nothing else counts then. Wrong numbers come before layouts, and poor quality
    comes last; within these groups the most certain rung leads.
    """
    return sorted(report.findings, key=_importance)


def _importance(finding: Finding) -> tuple[bool, bool, bool, int]:
    poor = finding.rung == QUALITY
    return finding.probe != "golden", poor, finding.probe == LAYOUTS, RUNGS.index(finding.rung)


def excess(report: ReportFacts) -> float:
    """The largest measured value of a finding as a multiple of its limit; 0 without findings that have numbers."""
    ratios = [abs(f.measured / f.limit) for f in report.findings if f.measured is not None and f.limit]
    return max((math.inf if math.isnan(ratio) else ratio for ratio in ratios), default=0.0)


def severity(report: ReportFacts) -> tuple[int, bool, bool, int, float]:
    """Sort key of reports: the worst one first, passing ones last."""
    if not report.findings:
        return (2 if report.verdict == PASS else 1, False, False, 0, 0.0)
    _, poor, layout, rung = _importance(ranked(report)[0])
    return (2 if report.verdict == PASS else 0, poor, layout, rung, -excess(report))


def demanding(notes: list[Note]) -> list[Note]:
    """The notes that a reader can act on: something was not judged, not run, refused, or not proven."""
    return [note for note in notes if note.id not in OBSERVATIONS]


def number(value: float | None) -> str:
    """Three figures, as in the texts of findings: 0.812, 3.1e-07, 1.24e+04; NaN, ∞; – for None."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.3g}"
