"""The result of a diagnosis as plain data, except for the evidence, which holds tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...declare.target import Target
from ...report.check_report import Report
from ...report.results import NOT_JUDGED, PASS, QUALITY, ErrorMap, Location
from ...report.results import NOT_RUN as NOT_RUN_NOTE
from ...report.results import _plain as plain_json
from ..causes.rank import Cause
from ..facts.evidence import OK, Evidence, StageState
from ..source.patch import Patch
from ..trace.faulty_line import FaultyLine

SCHEMA = 1
_TABLES = ("ratios", "permutations", "memory")
PASSED, FAILED, REFUSED, NOT_RUN = "pass", "FAIL", "not judged", "not run"  # of a case


@dataclass
class DiagnosisFacts:
    """The fault, its place and its cause, as data; `Diagnosis` adds the rendering.

    first_wrong_stage  None if the target passes, or if the golden is at fault
    location, map      place in that stage, in words and as a small picture
    causes             the best first
    stages             the table: propagated error, isolated error, state
    line               the line of the candidate's source that goes wrong first, where it can be traced
    patch              the edit of the candidate's source that makes it pass, if one was looked for and found
    suspects           golden stages that the candidate does not name and that could cause exactly this error
    float32            a 16-bit case with float32 inputs "passes", "fails" or "raises"; "" if it did not run
    traced             sentences: where NaN and Inf begin, which output gradient carries the fault
    undecided          sentences: what the evidence leaves open, and what would decide it
    case               the smallest failing case: name, sizes, seed, dtype, device, threads, strides, layouts, steps
    examined           the case in which stages, location and causes were found
    bundle             folder of the bundle, if one was written
    partial            why the diagnosis is incomplete: the budget, or an interrupt
    evidence           the evidence behind the causes (None if nothing is wrong)
    target             the diagnosed target, as the caller gave it (None if it is in another process)
    """

    verdict: str
    report: Report
    first_wrong_stage: str | None = None
    location: Location | None = None
    map: ErrorMap | None = None
    causes: list[Cause] = field(default_factory=list)
    stages: list[StageState] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    traced: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    case: dict[str, Any] = field(default_factory=dict)
    examined: dict[str, Any] = field(default_factory=dict)
    bundle: Path | None = None
    seconds: float = 0.0
    partial: str = ""
    evidence: Evidence | None = field(default=None, repr=False)
    target: Target | None = field(default=None, repr=False)
    write_bundle: Callable[..., Path] | None = field(default=None, repr=False)
    patch: Patch | None = None
    line: FaultyLine | None = None
    float32: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == PASS

    def faults_of_other_runs(self) -> dict[str, str]:
        """The stages that are right in the plain run and wrong in others, each with the first of these runs."""
        right = {stage.name for stage in self.stages if stage.state == OK}
        wrong = [r for r in self.report.rows if r.state == "bad" and r.run != "values" and r.tensor in right]
        return {row.tensor: row.run for row in reversed(wrong)}

    def case_outcomes(self) -> dict[str, str]:
        """The result of each of the target's cases: first those that ran, in their order, then those that did not."""
        report = self.report
        outcomes = dict.fromkeys(report.cases, PASSED)
        outcomes |= {n.case: REFUSED for n in report.notes if n.id == NOT_JUDGED and n.case in outcomes}
        missing = {note.case for note in report.notes if note.id == NOT_RUN_NOTE}
        wrong = [f.case for f in report.findings if f.rung != QUALITY]
        wrong += [row.case for row in report.rows if row.state == "bad"]
        outcomes |= dict.fromkeys([case for case in wrong if case], FAILED)
        ran = {case: outcome for case, outcome in outcomes.items() if outcome == FAILED or case not in missing}
        names = [case.name for case in self.target.cases] if self.target is not None else []
        not_run = [name for name in names if not any(case == name or case.startswith(f"{name} ") for case in ran)]
        return ran | dict.fromkeys([*not_run, *(case for case in missing if case not in ran)], NOT_RUN)

    def to_json(self) -> dict[str, object]:
        """Plain JSON values, including the report; tensors are only in the bundle."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "first_wrong_stage": self.first_wrong_stage,
            "location": plain_json(asdict(self.location)) if self.location is not None else None,
            "map": plain_json(asdict(self.map)) if self.map is not None else None,
            "causes": [plain_json(asdict(c)) for c in self.causes],
            "stages": [plain_json(asdict(s)) for s in self.stages],
            "line": None if self.line is None else plain_json(self.line.to_json()),
            "patch": None if self.patch is None else plain_json(self.patch.to_json()),
            "suspects": list(self.suspects),
            "float32": self.float32,
            "traced": list(self.traced),
            "undecided": list(self.undecided),
            "case": plain_json(self.case),
            "examined": plain_json(self.examined),
            "bundle": None if self.bundle is None else str(self.bundle),
            "seconds": self.seconds,
            "partial": self.partial,
            "evidence": self._evidence(),
            "report": self.report.to_json(),
        }

    def _evidence(self) -> dict[str, object]:
        if self.evidence is None:
            return {}
        tables = {name: [plain_json(asdict(row)) for row in getattr(self.evidence, name)] for name in _TABLES}
        by_name = {name: getattr(self.evidence, name) for name in ("runs", "influence")}
        return tables | {name: {k: plain_json(asdict(v)) for k, v in rows.items()} for name, rows in by_name.items()}
