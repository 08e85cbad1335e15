"""A check: one operator on one backend, with its jobs and the reports of their workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...assay.report.check_report import Report
from ...assay.report.html.view import ABSENT, Entry, case_states, unjudged
from ...assay.report.results import CERTAIN, FAIL, PASS, REFERENCE_FAULT, UNJUDGED, Finding, Note
from ..workers.pool import Died
from .merged_report import merge
from .selection import Job

INTERRUPTED = "interrupted"
PROCESS = "process"  # name of the probe for candidates that end their process
CANNOT_RUN = "cannot_run"


@dataclass
class Check:
    """One row of the matrix: an operator on a backend, its jobs, and the reports so far."""

    operator: str
    backend: str
    device: str
    jobs: list[Job]
    how: str = ""
    reason: str = ""
    source: str = ""
    index: int = 0  # of the target in the list that `source` names
    left_out: list[tuple[int, str]] = field(
        default_factory=list
    )  # (number of cases, which ones): not part of a run of this size
    reports: list[Report] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # case -> why it cannot run here
    done: int = 0
    problem: str = ""  # the mistake in the declaration, if there is one

    @property
    def name(self) -> str:
        return f"{self.operator} on {self.backend}" if self.backend else self.operator

    @property
    def complete(self) -> bool:
        return self.done == len(self.jobs)

    @property
    def judged(self) -> list[Job]:
        """The jobs that reached a verdict."""
        report = self.entry().report
        states = case_states(report) if report is not None else {}
        return [job for job in self.jobs if states.get(job.label, ABSENT) != ABSENT]

    def entry(self) -> Entry:
        """The check as the HTML page and the matrix show it."""
        report = self.report() if self.reports else None
        why_unjudged = unjudged(report) if report is not None and report.verdict in (PASS, UNJUDGED) else ""
        if report is not None and not why_unjudged:
            return Entry(self.operator, self.backend, report, how=self.how)
        reason = self.problem or self.reason or why_unjudged
        if not reason and self.skipped:
            reason = next(iter(self.skipped.values()))
        if not reason and not self.complete:
            reason = f"{INTERRUPTED} before the first case finished"
        misdeclared = bool(self.problem)
        return Entry(self.operator, self.backend, None, reason or "the target has no cases", misdeclared=misdeclared)

    def report(self) -> Report:
        """All reports merged into one, with cases in the order of the jobs, and notes on those that could not run."""
        position = {job.label: k for k, job in enumerate(self.jobs)}  # workers finish in any order
        merged = merge(self.name, sorted(self.reports, key=lambda r: position.get(r.cases[0], len(position))))
        merged.notes += [Note(CANNOT_RUN, "", reason, case) for case, reason in self.skipped.items()]
        merged.cases += [case for case in self.skipped if case not in merged.cases]
        merged.cases.sort(key=lambda case: position.get(case, len(position)))
        if not self.complete:
            merged.partial = f"{INTERRUPTED} after {self.done} of {len(self.jobs)} cases"
        if self.problem:
            merged.partial = self.problem
        return merged


def crash_report(check: Check, case: str, dtype: str, died: Died) -> Report:
    """A report that fails because the process died: CERTAIN, with the signal and the frame."""
    text = f"the process ended {died.how} while the candidate ran"
    text = f"while the candidate ran, its process was ended {died.how}" if died.ended else text
    text += f", {died.frame}" if died.frame else ""
    text += f"; its last line: {died.last_line!r}" if died.last_line else ""
    finding = Finding(CERTAIN, PROCESS, "", None, None, None, text, case)
    return Report(check.name, FAIL, findings=[finding], cases=[case], dtypes=[dtype], device=check.device)


def ended_report(check: Check, case: str, dtype: str, what: str, where: str) -> Report:
    """A report that fails because the candidate raised KeyboardInterrupt or SystemExit."""
    text = f"the candidate raised {what}, which would have ended the program" + (f": {where}" if where else "")
    finding = Finding(CERTAIN, PROCESS, "", None, None, None, text, case)
    return Report(check.name, FAIL, findings=[finding], cases=[case], dtypes=[dtype], device=check.device)


def broken_report(check: Check, case: str, dtype: str, text: str) -> Report:
    """A report without a verdict on the candidate, because the assay itself failed on this case."""
    finding = Finding(CERTAIN, "assay", "", None, None, None, f"the assay itself failed on this case: {text}", case)
    return Report(check.name, REFERENCE_FAULT, findings=[finding], cases=[case], dtypes=[dtype], device=check.device)
