"""Replies of workers, gathered into one report for each proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...assay.report.check_report import Report
from ...assay.report.html.view import ABSENT, NOT_JUDGED, Entry, case_states, shown_maps, unjudged
from ...assay.report.results import (
    CERTAIN,
    FAIL,
    PASS,
    REFERENCE_FAULT,
    UNJUDGED,
    Finding,
    Note,
    ProbeRun,
)
from .pool import Died
from .select import Job

GOOD_MAPS, BAD_MAPS = 1, 6
INTERRUPTED = "interrupted"
PROCESS = "process"  # the probe that found that the candidate ended its process
CANNOT_RUN = "cannot_run"
NOT_SELECTED = "not selected"  # what assay.check says of a probe that was not asked for


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


def merge(name: str, reports: Sequence[Report]) -> Report:
    """One report out of many: findings and rows one after another, probes added up, each note once."""
    verdicts = {r.verdict for r in reports}
    verdict = next((v for v in (FAIL, REFERENCE_FAULT) if v in verdicts), PASS)
    if UNJUDGED in verdicts and verdict == PASS and not any(_shows(r) for r in reports):
        verdict = UNJUDGED
    merged = Report(name, verdict)
    notes: dict[tuple[str, str, str, str], Note] = {}
    probes: dict[str, list[ProbeRun]] = {}
    for report in reports:
        merged.findings += report.findings
        merged.rows += report.rows
        merged.cases += [case for case in report.cases if case not in merged.cases]
        for note in report.notes:
            case = note.case if note.id in NOT_JUDGED else ""  # these say of every case that it was not judged
            notes.setdefault((note.id, note.tensor, note.text, case), note)
        for probe in report.probes:
            probes.setdefault(probe.name, []).append(probe)
        merged.maps |= {f"{key} {report.cases[0]}": m for key, m in report.maps.items()}
        merged.environment = _environment(merged.environment, report.environment)
        merged.seconds += report.seconds
        merged.dtypes += [d for d in report.dtypes if d not in merged.dtypes]
        merged.stages += [s for s in report.stages if s not in merged.stages]
        merged.device, merged.seed, merged.strict = report.device, report.seed, report.strict
        merged.partial = merged.partial or report.partial
    merged.notes = list(notes.values())
    merged.probes = [_added(runs) for runs in probes.values()]
    merged.maps = _fewer(merged)
    return merged


def _environment(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What the first says, with what was spent added up."""
    spent = [e.get("runs") or {} for e in (one, other)]
    runs = {k: sum(s.get(k, 0) for s in spent) for k in {**spent[0], **spent[1]}}
    interpreted = sum(e.get("interpreted", 0) for e in (one, other))
    return {**other, **one, "runs": runs, "interpreted": interpreted}


def _shows(report: Report) -> bool:
    """Whether a report says anything of the candidate: that no tokens give none does not."""
    return report.verdict == PASS and any(r.kind == "output" and 0 not in r.shape for r in report.rows)


def _added(runs: Sequence[ProbeRun]) -> ProbeRun:
    """One probe over all cases; where it was not selected it is the size of the run that says so."""
    ran = [p for p in runs if p.ran]
    reasons = sorted({p.reason for p in runs if not p.ran and p.reason and p.reason != NOT_SELECTED})
    if any(p.reason == NOT_SELECTED for p in runs if not p.ran):
        reasons.append("the others with --thorough" if ran else "with --thorough")
    share = f"{len(ran)} of {len(runs)} cases" if 0 < len(ran) < len(runs) else ""
    reason = "; ".join(filter(None, (share, *reasons)))
    return ProbeRun(runs[0].name, bool(ran), reason, sum(p.seconds for p in runs), sum(p.runs for p in runs))


def _fewer(report: Report) -> dict[str, Any]:
    if not report.ok:
        return shown_maps(report, BAD_MAPS)
    good = sorted(report.maps.items(), key=lambda item: item[1].shape[0] * item[1].shape[1])
    return dict(good[-GOOD_MAPS:])


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
