"""Which of a target's cases passed, failed or did not run while it was diagnosed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...report.results import NOT_JUDGED, QUALITY
from ...report.results import NOT_RUN as NOT_RUN_NOTE

if TYPE_CHECKING:
    from .result import DiagnosisFacts

PASSED, FAILED, REFUSED, NOT_RUN = "pass", "FAIL", "not judged", "not run"


def case_outcomes(diagnosis: DiagnosisFacts) -> dict[str, str]:
    """The result of each case, by name: first those that ran, in their order, then those that did not."""
    report = diagnosis.report
    outcomes = dict.fromkeys(report.cases, PASSED)
    outcomes |= {note.case: REFUSED for note in report.notes if note.id == NOT_JUDGED and note.case in outcomes}
    missing = {note.case for note in report.notes if note.id == NOT_RUN_NOTE}
    failed = [f.case for f in report.findings if f.rung != QUALITY] + [r.case for r in report.rows if r.state == "bad"]
    outcomes |= dict.fromkeys([case for case in failed if case], FAILED)
    ran = {case: outcome for case, outcome in outcomes.items() if outcome == FAILED or case not in missing}
    names = [case.name for case in diagnosis.target.cases] if diagnosis.target is not None else []
    not_run = [name for name in names if not any(case == name or case.startswith(f"{name} ") for case in ran)]
    return ran | dict.fromkeys([*not_run, *(case for case in missing if case not in ran)], NOT_RUN)
