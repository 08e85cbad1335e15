"""Time limits of candidate runs, and how a run that exceeds its limit is reported."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...assay.diagnosis import Diagnosis
    from ...assay.report.check_report import Report
    from ..workers.messages import RunMessage

MINIMUM, FIRST_SHARE, SHARE, TIMES_LONGEST = 5.0, 1 / 2, 1 / 3, 4.0
ID = "no_end"
NOT_FINISHED = "not finished"  # the answer of a replay whose run hung
ADVICE = (
    "look for a loop or a barrier that waits forever: run only that case (--case) and see where it stands with py-spy "
    "or gdb; if it is only slow, give a larger {option}"
)


class RunDeadline:
    """The time limit of the candidate's present run: at least 5 s and four times the longest run so far, and

    first run of a case    the rest of the budget, but at least half of it, because kernels are compiled and tuned
    later runs of a case   a third of the budget

    Importing the target may take the whole budget. Without a budget there is no limit. While a run is nested in another
    (a call between forward and backward), the clock of the outer run stops.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self.first: float | None = None  # when the first run began
        self.began: float | None = None  # when the present run began; None between runs
        self.case = ""
        self.outer: list[tuple[str, float]] = []  # (case, beginning) of runs that wait for a nested run
        self.seen: set[str] = set()
        self.importing = False
        self.longest = 0.0

    def begin_import(self) -> None:
        self.importing, self.began = True, time.monotonic()

    def begin(self, case: str) -> None:
        self.importing = False
        if self.began is not None:
            self.outer.append((self.case, self.began))
        self.case, self.began = case, time.monotonic()
        self.first = self.began if self.first is None else self.first

    def end(self) -> None:
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
        """The limit of the present run."""
        if self.importing and self.budget is not None:
            return max(MINIMUM, self.budget)
        if self.budget is None or self.first is None or self.began is None:
            return float("inf")
        left = self.first + self.budget - self.began
        share = SHARE * self.budget if self.case in self.seen else max(left, FIRST_SHARE * self.budget)
        return max(MINIMUM, TIMES_LONGEST * self.longest, share)

    def until(self) -> float | None:
        """The time.monotonic() at which the present run must end, or None."""
        return None if self.began is None or self.budget is None else self.began + self.seconds


def timeout_sentence(run: RunMessage, where: str) -> str:
    """Which run hung, for how long, at which line."""
    place = f", {where}" if where else ""
    return (
        f"run {run['run']!r} of probe {run['probe']} did not end within {run['seconds']:.2g} s "
        f"(case {run['case']}, seed {run['seed']}){place}"
    )


def timed_out_replay(error: BaseException, before: str, run: RunMessage, where: str) -> Report:
    """The report of a replay that a hung run ended, with the findings made before."""
    from ...assay.report.results import CERTAIN, FAIL, NOT_RUN, Finding, Note

    report = error.report  # type: ignore[attr-defined]
    sentence = timeout_sentence(run, where)
    report.findings.append(Finding(CERTAIN, "process", "", None, None, None, sentence, run["case"]))
    report.notes = [n for n in report.notes if n.id != NOT_RUN or n.case != run["case"]]
    story = f"{NOT_FINISHED}: the verdict was {before}; here {sentence}"
    report.notes.insert(0, Note("replay", "", story, run["case"]))
    report.partial, report.verdict = "a run did not end", FAIL
    report.environment["replay"] = {"answer": NOT_FINISHED, "versions": {}, "bits": []}
    return report


def add_timeout(diagnosis: Diagnosis, case: str, sentence: str, option: str = "--budget") -> Diagnosis:
    """Add a hung run to a diagnosis: as its cause if nothing else is wrong, otherwise as one more finding.

    option: of the command, which sets the limit
    """
    from ...assay.diagnosis import Cause
    from ...assay.report.results import CERTAIN, FAIL, NOT_RUN, PASS, UNJUDGED, Finding

    advice = ADVICE.format(option=option)
    diagnosis.report.findings.append(Finding(CERTAIN, "process", "", None, None, None, sentence, case))
    diagnosis.report.notes = [n for n in diagnosis.report.notes if n.id != NOT_RUN or n.case != case]
    diagnosis.report.partial = diagnosis.partial = "a run did not end"
    if diagnosis.verdict in (PASS, UNJUDGED):
        diagnosis.verdict = diagnosis.report.verdict = FAIL
        cause = Cause(ID, 1.0, "", [sentence], {}, f"{diagnosis.report.target} does not end", advice)
        diagnosis.causes = [cause]
    else:
        diagnosis.traced.insert(0, f"Also, {sentence}. {advice[0].upper()}{advice[1:]}.")
    return diagnosis
