"""Replies of workers, gathered into one report for each proof."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...assay.html.view import ABSENT, Entry, case_states, unjudged
from ...assay.results import (
    CERTAIN,
    FAIL,
    PASS,
    REFERENCE_FAULT,
    UNJUDGED,
    Finding,
    Note,
    Report,
)
from ..workers.pool import Died
from .merged_report import merge
from .selection import Job

INTERRUPTED = "interrupted"
PROCESS = "process"  # the probe that found that the candidate ended its process
CANNOT_RUN = "cannot_run"


@dataclass
class Proof:
    """One line of the matrix while it is being made: an operator on a backend, its jobs, and what came back."""

    operator: str
    backend: str
    device: str
    jobs: list[Job]
    how: str = ""
    reason: str = ""
    source: str = ""
    index: int = 0  # of the target in what `source` names
    left_out: list[tuple[int, str]] = field(default_factory=list)  # cases that a run of this size does not try
    reports: list[Report] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # case -> why it cannot run here
    done: int = 0
    problem: str = ""  # what the user got wrong in the declaration

    @property
    def name(self) -> str:
        return f"{self.operator} on {self.backend}" if self.backend else self.operator

    @property
    def complete(self) -> bool:
        return self.done == len(self.jobs)

    @property
    def judged(self) -> list[Job]:
        """Those that came to a verdict."""
        report = self.entry().report
        states = case_states(report) if report is not None else {}
        return [job for job in self.jobs if states.get(job.label, ABSENT) != ABSENT]

    def entry(self) -> Entry:
        """The proof as the page and the matrix show it."""
        report = self.report() if self.reports else None
        nothing = unjudged(report) if report is not None and report.verdict in (PASS, UNJUDGED) else ""
        if report is not None and not nothing:
            return Entry(self.operator, self.backend, report, how=self.how)
        reason = self.problem or self.reason or nothing
        if not reason and self.skipped:
            reason = next(iter(self.skipped.values()))
        if not reason and not self.complete:
            reason = f"{INTERRUPTED} before its first case was finished"
        misdeclared = bool(self.problem)
        return Entry(self.operator, self.backend, None, reason or "it has no cases", misdeclared=misdeclared)

    def report(self) -> Report:
        planned = {job.label: k for k, job in enumerate(self.jobs)}  # workers finish in any order
        merged = merge(self.name, sorted(self.reports, key=lambda r: planned.get(r.cases[0], len(planned))))
        merged.notes += [Note(CANNOT_RUN, "", reason, case) for case, reason in self.skipped.items()]
        merged.cases += [case for case in self.skipped if case not in merged.cases]
        merged.cases.sort(key=lambda case: planned.get(case, len(planned)))
        if not self.complete:
            merged.partial = f"{INTERRUPTED} after {self.done} of {len(self.jobs)} cases"
        if self.problem:
            merged.partial = self.problem
        return merged


def crash_report(proof: Proof, case: str, dtype: str, died: Died) -> Report:
    """The death of the process as evidence: CERTAIN, with the signal and the frame that it came from."""
    text = f"the process ended {died.how} while the candidate ran"
    text += f", {died.frame}" if died.frame else ""
    text += f"; its last line: {died.last_line!r}" if died.last_line else ""
    finding = Finding(CERTAIN, PROCESS, "", None, None, None, text, case)
    return Report(proof.name, FAIL, findings=[finding], cases=[case], dtypes=[dtype], device=proof.device)


def ended_report(proof: Proof, case: str, dtype: str, what: str, where: str) -> Report:
    """The candidate raised what ends a program (KeyboardInterrupt, SystemExit), not what a caller can handle."""
    text = f"the candidate raised {what}, which would have ended the program: {where}"
    finding = Finding(CERTAIN, PROCESS, "", None, None, None, text, case)
    return Report(proof.name, FAIL, findings=[finding], cases=[case], dtypes=[dtype], device=proof.device)


def broken_report(proof: Proof, case: str, dtype: str, text: str) -> Report:
    """The assay itself failed on this case: nobody is accused, and nothing is certified."""
    finding = Finding(CERTAIN, "assay", "", None, None, None, f"the assay itself failed on this case: {text}", case)
    return Report(proof.name, REFERENCE_FAULT, findings=[finding], cases=[case], dtypes=[dtype], device=proof.device)
