"""A run that does not end: how long one may take, and what is said of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...assay.diagnosis import Diagnosis
    from ...assay.report.check_report import Report

LEAST, FIRST, SHARE, TIMES = 5.0, 1 / 2, 1 / 3, 4.0
ID = "no_end"
NOT_FINISHED = "not finished"  # what a replay answers then
MEND = (
    "look for a loop or a barrier that waits for what never comes: run that case alone (--case) and see where it "
    "stands with py-spy, gdb or compute-sanitizer; where it is only slow, give a larger --budget"
)


class Patience:
    """How long a run of the candidate may take: never less than 5 s or four times the longest so far, and

    the first of a case        what is left of the budget, or half of it (kernels are compiled and tuned in it)
    any other run of a case    a third of the budget

    Importing the target may take the budget. Without a budget a run may take for ever. While another run goes on within
    a run (a call between forward and backward), the time of the outer one stands still.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self.first: float | None = None  # when the first run began
        self.began: float | None = None  # when the present one did; None between two runs
        self.case = ""
        self.outer: list[tuple[str, float]] = []  # case and beginning of runs that one within them has interrupted
        self.seen: set[str] = set()
        self.importing = False
        self.longest = 0.0

    def imports(self) -> None:
        self.importing, self.began = True, time.monotonic()

    def begins(self, case: str) -> None:
        self.importing = False
        if self.began is not None:
            self.outer.append((self.case, self.began))
        self.case, self.began = case, time.monotonic()
        self.first = self.began if self.first is None else self.first

    def ended(self) -> None:
        took = 0.0
        if self.began is not None and not self.importing:
            took = time.monotonic() - self.began
            self.longest = max(self.longest, took)
            self.seen.add(self.case)
        self.began, self.importing = None, False
        if self.outer:
            self.case, began = self.outer.pop()
            self.began = began + took

    @property
    def seconds(self) -> float:
        """What the present run may take."""
        if self.importing and self.budget is not None:
            return max(LEAST, self.budget)
        if self.budget is None or self.first is None or self.began is None:
            return float("inf")
        left = self.first + self.budget - self.began
        share = SHARE * self.budget if self.case in self.seen else max(left, FIRST * self.budget)
        return max(LEAST, TIMES * self.longest, share)

    def until(self) -> float | None:
        """The time at which the present run is ended, if there is one."""
        return None if self.began is None or self.budget is None else self.began + self.seconds


def said(run: dict[str, Any], where: str) -> str:
    """One sentence: which run, after how long, at which line."""
    place = f", {where}" if where else ""
    return (
        f"run {run['run']!r} of probe {run['probe']} did not end within {run['seconds']:.2g} s "
        f"(case {run['case']}, seed {run['seed']}){place}"
    )


def replayed(error: BaseException, before: str, run: dict[str, Any], where: str) -> Report:
    """The report of a replay that such a run has ended: what was found until then stands in it."""
    from ...assay.report.results import CERTAIN, FAIL, NOT_RUN, Finding, Note

    report = error.report  # type: ignore[attr-defined]
    sentence = said(run, where)
    report.findings.append(Finding(CERTAIN, "process", "", None, None, None, sentence, run["case"]))
    report.notes = [n for n in report.notes if n.id != NOT_RUN or n.case != run["case"]]
    story = f"{NOT_FINISHED}: the verdict was {before}; here {sentence}"
    report.notes.insert(0, Note("replay", "", story, run["case"]))
    report.partial, report.verdict = "a run did not end", FAIL
    report.environment["replay"] = {"answer": NOT_FINISHED, "versions": {}, "bits": []}
    return report


def into(found: Diagnosis, run: dict[str, Any], where: str) -> Diagnosis:
    """A diagnosis that was ended by such a run: it is the finding where there was none, and else stands with them."""
    from ...assay.diagnosis import Cause
    from ...assay.report.results import CERTAIN, FAIL, NOT_RUN, PASS, UNJUDGED, Finding

    sentence = said(run, where)
    found.report.findings.append(Finding(CERTAIN, "process", "", None, None, None, sentence, run["case"]))
    found.report.notes = [n for n in found.report.notes if n.id != NOT_RUN or n.case != run["case"]]
    found.report.partial = found.partial = "a run did not end"
    if found.verdict in (PASS, UNJUDGED):
        found.verdict = found.report.verdict = FAIL
        cause = Cause(ID, 1.0, "", [sentence], {}, f"{found.report.target} does not end", MEND)
        found.causes = [cause]
    else:
        found.traced.insert(0, f"And {sentence}. {MEND[0].upper()}{MEND[1:]}.")
    return found
