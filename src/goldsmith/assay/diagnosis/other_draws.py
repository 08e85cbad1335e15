"""A kernel that is right at the first draw and wrong at another one: there the fault shows, and there it is examined.

Two indices that meet, a token that is dropped, an empty group: a draw may hold none. What fails on other inputs, called
first and with nothing kept from before, is wrong by itself, and no state is to blame.
"""

from __future__ import annotations

from collections.abc import Callable

from ..declare.case import Case
from ..judge.examination import Examination
from ..report.check_report import Report
from ..report.results import FAIL, QUALITY
from .candidate_state import CandidateState
from .rules.reading import plain, run_named
from .runs import OTHERS, facts

SALT = 1  # of the draw that a check calls with other inputs
Examined = tuple[Report, list[Examination]]


def only_other_inputs_fail(failing: Examination, report: Report) -> bool:
    """Whether only a run of other inputs is wrong."""
    findings = [f for f in report.findings if f.rung != QUALITY]
    others = all(plain(run_named(f.text)) == OTHERS for f in findings)
    return bool(findings) and others and failing._first is not None


def failing_draw(
    failing: Examination, report: Report, state: CandidateState, examine: Callable[[Case], Examined]
) -> tuple[Examination, Report]:
    """The examination, and the report, of the draw at which the first call is wrong; else what was given.

    It must be one that `asks`.  examine  checks a case and gives the first examination that fails
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
    other.findings += [f for f in findings if f.text not in {m.text for m in mine}]
    return examinations[0], other


def _of_another_run(finding: object) -> bool:
    return run_named(getattr(finding, "text", "")) not in ("", "values")
