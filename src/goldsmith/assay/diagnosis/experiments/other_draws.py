"""If a kernel is right for the first draw of inputs and wrong for another, examines the other draw.

The first draw may lack what triggers the fault: two equal indices, a dropped token, an empty group. If a kernel fails
on other inputs in its first call, it is wrong without any state from earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable

from ...declare.case import Case
from ...judge.examination import Examination
from ...report.check_report import Report
from ...report.results import FAIL, QUALITY, Finding
from ...support.candidate_state import CandidateState
from ..causes.rules.reading import label, plain
from .runs import OTHERS, facts

SALT = 1  # of the draw that a check uses for other inputs
Examined = tuple[Report, list[Examination]]


def only_other_inputs_fail(failing: Examination, report: Report) -> bool:
    """True if only a run with other inputs is wrong."""
    findings = [f for f in report.findings if f.rung != QUALITY]
    others = all(plain(label(f)) == OTHERS for f in findings)
    return bool(findings) and others and failing._first is not None


def failing_draw(
    failing: Examination, report: Report, state: CandidateState, examine: Callable[[Case], Examined]
) -> tuple[Examination, Report]:
    """The examination and report of the draw whose first call fails; otherwise the arguments unchanged.

    Requires only_other_inputs_fail(). examine: checks a case and returns the first failing examination
    """
    findings = [f for f in report.findings if f.rung != QUALITY]
    fact = facts(failing, only=(OTHERS,))[0].get(OTHERS)
    if fact is not None and (fact.error or fact.stale):
        return failing, report
    with state.cleared():
        other, examinations = examine(failing.case.variant(SALT))
    mine = [f for f in other.findings if f.rung != QUALITY]
    if other.verdict != FAIL or not examinations or examinations[0]._first is None or all(map(_of_another_run, mine)):
        return failing, report
    other.findings += [f for f in findings if f not in mine]
    return examinations[0], other


def _of_another_run(finding: Finding) -> bool:
    return label(finding) not in ("", "values")
