"""Finds the failing case that a diagnosis examines: the cases in order, then calls of other sizes and other draws."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .. import probes as catalogue
from ..checks import INTERRUPTED, examine
from ..declare.case import Case
from ..declare.target import Target
from ..judge.examination import Examination
from ..report.check_report import Report
from ..report.results import FAIL, NOT_RUN, PASS, UNJUDGED, Note
from ..support.candidate_state import CandidateState
from ..support.deadline import until
from .clock import CHECKING, SPENT, Clock
from .experiments.extra_calls import extra_calls
from .experiments.other_draws import failing_draw, only_other_inputs_fail
from .facts.evidence import RunFact


def informative(cases: list[Case]) -> list[Case]:
    """The cases in their order, but those with a size of 0 or 1 last: they show a fault, but not its pattern."""
    return sorted(cases, key=lambda c: any(isinstance(v, int) and v <= 1 for v in c.sizes.values()))


def find_failing(
    target: Target, cases: list[Case], dtype: torch.dtype | None, device: str | torch.device, seed: int,
    selected: frozenset[str], clock: Clock, state: CandidateState,
) -> tuple[Report, Examination | None, dict[str, RunFact]]:  # fmt: skip
    """The failing check, or the last check if all pass; cheap probes run on all cases first. Also the later runs
    that failed.
    """
    quick = selected & frozenset(catalogue.QUICK)
    share = None if clock.seconds is None else CHECKING * clock.seconds / 2
    report, examinations = examine(target, cases, dtype, device, seed, quick, share, until_failing=True)
    if _no_failure(report) and not report.partial and clock.spent(CHECKING, more=report.seconds):
        report.partial = SPENT.format(clock.seconds) if report.verdict == PASS else ""
        without = ", ".join([*sorted(selected - quick), "calls of other sizes"])  # both run the same references again
        report.notes.append(
            Note("budget", "probes", f"{SPENT.format(clock.seconds)}; left out: {without}", "", without)
        )
        return report, None, {}
    if _no_failure(report) and quick != selected and not report.partial:
        whole, examinations = examine(target, cases, dtype, device, seed, selected, share, until_failing=True)
        # If time ran out, keep the verdict of the cheap probes: they judged every case, these did not. An interrupt
        # discards it.
        if whole.partial or whole.verdict != UNJUDGED or report.verdict != PASS:
            report = whole
        else:
            left = dict.fromkeys(n.case for n in whole.notes if n.id == NOT_RUN and n.left_out)
            text = f"{', '.join(sorted(selected - quick))} on {', '.join(left)}"
            report.notes += (
                [Note("budget", "probes", f"{SPENT.format(share)}; left out: {text}", "", text)] if left else []
            )
            report.notes += [n for n in whole.notes if n.id == "budget"]
    if _no_failure(report) and {"second_call", "repeats"} <= selected and not report.partial:
        return report, *_extra_calls(report, target, cases[0], dtype, device, seed, selected, share, clock, state)
    return report, examinations[0] if examinations else None, {}


def prefer_numbers(
    target: Target, cases: list[Case], failing: Examination, report: Report, seed: int, selected: frozenset[str],
    clock: Clock,
) -> tuple[Examination, Report]:  # fmt: skip
    """If a case raises, prefer a failure with numbers, which says more: the forward alone, or another case."""
    error = None if failing._first is None else failing._first.error
    if error is None or clock.lacks("other cases, which may not raise", CHECKING / 2):
        return failing, report
    share = None if clock.seconds is None else CHECKING / 2 * clock.seconds
    tries = [(target, [c for c in cases if c.name != failing.case.name])]
    if failing._first is not None and failing._first.phase == "backward":
        tries.insert(0, (replace(target, backward=None, golden_backward=None, grads=None), [failing.case]))
    raised = [f for f in report.findings if f.kind == "raised"]
    for other, left in tries:
        if not left:
            continue
        numeric, examinations = examine(
            other, left, failing.dtype, failing.device, seed, selected & frozenset(catalogue.QUICK), share,
            until_failing=True,
        )  # fmt: skip
        first = examinations[0]._first if examinations else None
        if numeric.verdict == FAIL and first is not None and first.error is None:
            numeric.findings += raised
            return examinations[0], numeric
    return failing, report


def prefer_failing_draw(
    target: Target,
    failing: Examination,
    report: Report,
    state: CandidateState,
    seed: int,
    selected: frozenset[str],
    clock: Clock,
) -> tuple[Examination, Report]:
    """If the case fails only with other inputs, the examination of those inputs."""
    if not only_other_inputs_fail(failing, report) or clock.lacks("the failing draw by itself", CHECKING):
        return failing, report
    quick, share = selected & frozenset(catalogue.QUICK), None if clock.seconds is None else clock.seconds * CHECKING
    return failing_draw(
        failing, report, state,
        lambda case: examine(target, [case], failing.dtype, failing.device, seed, quick, share, until_failing=True),
    )  # fmt: skip


def _no_failure(report: Report) -> bool:
    """True if nothing is wrong so far; some cases may not have run for lack of time."""
    return report.verdict == PASS or (report.verdict == UNJUDGED and any(n.id == NOT_RUN for n in report.notes))


def _extra_calls(
    report: Report, target: Target, case: Case, dtype: torch.dtype | None, device: str | torch.device, seed: int,
    selected: frozenset[str], share: float | None, whole: Clock, state: CandidateState,
) -> tuple[Examination | None, dict[str, RunFact]]:  # fmt: skip
    """The examination that fails after calls of other sizes or with more threads; adds its findings to the report."""
    clock = Clock(share)
    examination = Examination(target, case, dtype or target.dtypes[0], device, seed, selected, case.name)
    try:
        with until(clock.started + (share or math.inf)) as left_out:
            later = extra_calls(
                examination, [c for c in target.cases if c.name != case.name], state,
                spent=lambda: clock.lacks("some calls of other sizes, or with more threads"),
            )  # fmt: skip
    except KeyboardInterrupt:
        report.partial, report.verdict = INTERRUPTED, UNJUDGED
        return None, {}
    finally:
        whole.left_out += clock.left_out
    if not later:
        whole.left_out += left_out
        return None, {}
    report.findings += examination.findings
    report.maps.update(examination.maps)
    report.verdict = FAIL
    return examination, later
