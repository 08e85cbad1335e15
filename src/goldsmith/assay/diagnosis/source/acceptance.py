"""Whether an edited candidate passes: every declared case with fresh draws, then the check with every default probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ....core.tracing import TargetError
from ...checks import examine
from ...declare.target import Target
from ...gate.isolation.candidate_process import CandidateEnded, CandidateProcess
from ...gate.isolation.zygote_process import NoZygote
from ...judge.examination import Examination
from ...probes import QUICK, select
from ...report.check_report import Report
from ...report.results import FAIL, NOT_RUN, PASS, QUALITY
from .children.candidate_of_files import candidate_of_files
from .reading.candidate_source import CandidateSource

_FRESH = 104_729  # added to the seed: draws that the search has not seen


@dataclass(frozen=True)
class Accepted:
    """cases: that the edited candidate passes; remaining: other faults, which are there without the edit too."""

    cases: int
    remaining: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotAccepted:
    """probes: those that fail with the edit, where every case is right; remaining: what they found; cases: how many."""

    probes: frozenset[str] = frozenset()
    remaining: tuple[str, ...] = ()
    cases: int = 0


@dataclass
class Acceptance:
    """Judges edited candidates of one target.

    wrong: the results that are wrong without an edit; boxed: edits of a stranger, which run in a sandbox.
    """

    target: Target
    source: CandidateSource
    failing: Examination
    wrong: tuple[str, ...]
    boxed: bool = False
    _before: dict[frozenset[str], set[str]] = field(default_factory=dict)

    def of(self, edited: Mapping[str, str], seconds: float) -> Accepted | NotAccepted:
        """NotAccepted if the edited candidate fails a case, or a probe that it passes without the edit.

        Beside the cases, an error as small as another formula's rounding is no reason: the formula is the author's.
        """
        process = self._process(edited)
        try:
            quick = self._report(process, frozenset(QUICK), seconds, until_failing=True)
            if quick is None or quick.verdict != PASS:
                return NotAccepted()
            whole = self._report(process, select("default"), seconds)
        finally:
            process.close()
        replaced = self.boxed and any(event[0] == "patched" for event in process.seen)
        if whole is None or whole.verdict not in (PASS, FAIL) or replaced:
            return NotAccepted()
        findings = [f for f in whole.findings if f.rung != QUALITY]
        probes = frozenset(f.probe for f in findings if not f.values.get("another_formula"))
        remaining = tuple(dict.fromkeys(f.text for f in findings))
        new = probes - self._failing_before(probes, seconds)
        return NotAccepted(new, remaining, len(whole.cases)) if new else Accepted(len(whole.cases), remaining)

    def _failing_before(self, probes: frozenset[str], seconds: float) -> set[str]:
        """The probes among these that find something in the results which are right without an edit."""
        if probes and probes not in self._before:
            process = self._process({})
            try:
                report = self._report(process, select(tuple(probes)), seconds)
            finally:
                process.close()
            findings = [] if report is None else report.findings
            self._before[probes] = {f.probe for f in findings if f.rung != QUALITY and f.tensor not in self.wrong}
        return self._before.get(probes, set())

    def _report(
        self, process: CandidateProcess, probes: frozenset[str], seconds: float, until_failing: bool = False
    ) -> Report | None:
        """The report on every case with fresh draws; None if the process ended or the time was too short."""
        changed, failing = replace(self.target, runner=process), self.failing
        cases = [*changed.cases, *([failing.case] if failing.case.given else [])]
        try:
            report, _ = examine(
                changed,
                cases,
                None,
                failing.device,
                failing.seed + _FRESH,
                probes,
                seconds,
                until_failing=until_failing,
            )
        except (CandidateEnded, NoZygote, TargetError):
            return None
        if report.partial:
            raise KeyboardInterrupt
        return None if any(n.id in (NOT_RUN, "budget") for n in report.notes) else report

    def _process(self, edited: Mapping[str, str]) -> CandidateProcess:
        return candidate_of_files(self.source, self.failing.device, edited, boxed=self.boxed)
