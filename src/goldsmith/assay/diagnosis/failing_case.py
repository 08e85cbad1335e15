"""Finds the failing case that a diagnosis examines: the cases in order, then calls of other sizes and other draws."""

from __future__ import annotations

import math
from dataclasses import replace

from ..checks import INTERRUPTED
from ..declare.case import Case
from ..judge.examination import Examination
from ..report.check_report import Report
from ..report.results import FAIL, NOT_RUN, PASS, QUALITY, UNJUDGED, Finding, Note
from ..support.candidate_state import CandidateState
from ..support.deadline import until
from .causes.rules.reading import label, plain
from .clock import CHECKING, SPENT, Clock
from .experiments.extra_calls import extra_calls
from .experiments.runs import OTHERS, facts
from .facts.evidence import RunFact
from .request import Request

_SALT = 1  # of the draw that a check uses for other inputs


def informative(cases: list[Case]) -> list[Case]:
    """The cases in their order, but those with a size of 0 or 1 last: they show a fault, but not its pattern."""
    return sorted(cases, key=lambda c: any(isinstance(v, int) and v <= 1 for v in c.sizes.values()))


def find_failing(request: Request, state: CandidateState) -> tuple[Report, Examination | None, dict[str, RunFact]]:
    """The failing check, or the last check if all pass; cheap probes run on all cases first. Also the later runs
    that failed.
    """
    clock, selected = request.clock, request.selected
    report, examinations = request.check(request.cases)
    others = ", ".join(sorted(selected - request.quick))
    if _no_failure(report) and not report.partial and clock.spent(CHECKING, more=report.seconds):
        report.partial = SPENT.format(clock.seconds) if report.verdict == PASS else ""
        # both run the same references again
        report.notes.append(_left_out(clock.seconds, ", ".join(filter(None, [others, "calls of other sizes"]))))
        return report, None, {}
    if _no_failure(report) and request.quick != selected and not report.partial:
        whole, examinations = request.check(request.cases, probes=selected)
        # If time ran out, keep the verdict of the cheap probes: they judged every case, these did not. An interrupt
        # discards it.
        if whole.partial or whole.verdict != UNJUDGED or report.verdict != PASS:
            report = whole
        else:
            left = dict.fromkeys(n.case for n in whole.notes if n.id == NOT_RUN and n.left_out)
            report.notes += [_left_out(request.share, f"{others} on {', '.join(left)}")] if left else []
            report.notes += [n for n in whole.notes if n.id == "budget"]
    if _no_failure(report) and {"second_call", "repeats"} <= selected and not report.partial:
        return report, *_extra_calls(request, report, state)
    return report, examinations[0] if examinations else None, {}


def _left_out(seconds: float | None, what: str) -> Note:
    return Note("budget", "probes", f"{SPENT.format(seconds)}; left out: {what}", "", what)


def prefer_numbers(request: Request, failing: Examination, report: Report) -> tuple[Examination, Report]:
    """If a case raises, prefer a failure with numbers, which says more: the forward alone, or another case."""
    first, target = failing._first, request.target
    if first is None or first.error is None:
        return failing, report
    if request.clock.lacks("other cases, which may not raise", CHECKING / 2):
        return failing, report
    tries = [(target, [c for c in request.cases if c.name != failing.case.name])]
    if first.phase == "backward":
        tries.insert(0, (replace(target, backward=None, golden_backward=None, grads=None), [failing.case]))
    raised = [f for f in report.findings if f.kind == "raised"]
    for other, left in tries:
        if not left:
            continue
        numeric, examinations = request.check(left, failing.dtype, target=other)
        run = examinations[0]._first if examinations else None
        if numeric.verdict == FAIL and run is not None and run.error is None:
            numeric.findings += raised
            return examinations[0], numeric
    return failing, report


def prefer_failing_draw(
    request: Request, failing: Examination, report: Report, state: CandidateState
) -> tuple[Examination, Report]:
    """If the case fails only with other inputs, the examination of those inputs, if its first call fails.

    The first draw may lack what triggers the fault: two equal indices, a dropped token, an empty group. If a kernel
    fails on other inputs in its first call, it is wrong without any state from earlier calls.
    """
    findings = [f for f in report.findings if f.rung != QUALITY]
    only_others = bool(findings) and all(plain(label(f)) == OTHERS for f in findings)
    if not only_others or failing._first is None or request.clock.lacks("the failing draw by itself", CHECKING):
        return failing, report
    fact = facts(failing, only=(OTHERS,)).get(OTHERS)
    if fact is not None and (fact.error or fact.stale):
        return failing, report
    with state.cleared():
        other, examinations = request.check([failing.case.variant(_SALT)], failing.dtype)
    mine = [f for f in other.findings if f.rung != QUALITY]
    if other.verdict != FAIL or not examinations or examinations[0]._first is None or all(map(_of_another_run, mine)):
        return failing, report
    other.findings += [f for f in findings if f not in mine]
    return examinations[0], other


def _of_another_run(finding: Finding) -> bool:
    return label(finding) not in ("", "values")


def _no_failure(report: Report) -> bool:
    """True if nothing is wrong so far; some cases may not have run for lack of time."""
    return report.verdict == PASS or (report.verdict == UNJUDGED and any(n.id == NOT_RUN for n in report.notes))


def _extra_calls(
    request: Request, report: Report, state: CandidateState
) -> tuple[Examination | None, dict[str, RunFact]]:
    """The examination that fails after calls of other sizes or with more threads; adds its findings to the report."""
    target, case, clock = request.target, request.cases[0], Clock(request.share)
    dtype = request.dtype or target.dtypes[0]
    examination = Examination(target, case, dtype, request.device, request.seed, request.selected, case.name)
    others = [c for c in target.cases if c.name != case.name]
    try:
        with until(clock.started + (request.share or math.inf)) as left_out:
            later = extra_calls(
                examination, others, state,
                spent=lambda: clock.lacks("some calls of other sizes, or with more threads"),
            )  # fmt: skip
    except KeyboardInterrupt:
        report.partial, report.verdict = INTERRUPTED, UNJUDGED
        return None, {}
    finally:
        request.clock.left_out += clock.left_out
    if not later:
        request.clock.left_out += left_out
        return None, {}
    report.findings += examination.findings
    report.maps.update(examination.maps)
    report.verdict = FAIL
    return examination, later
