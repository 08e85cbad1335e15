"""`diagnose`: from a target to the stage that goes wrong first and the causes that fit, the likeliest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import probes as catalogue
from ..case import Case
from ..check import examine
from ..results import FAIL, PASS, REFERENCE_FAULT, Location, Report, TargetError
from ..results import _plain as plain_json
from ..session import Session
from ..target import Target
from .collect import collect, described
from .evidence import Evidence, StageState
from .rank import Cause, rank

_CHECKING = 0.5  # of the budget, at most, goes to finding a failing case
_REPEATS = 10


@dataclass
class Diagnosis:
    """What is wrong, where, why we think so; nothing where nothing is wrong.

    first_wrong_stage  None when the target passes
    causes             the best first
    stages             the table: propagated error, isolated error, state
    suspects           golden stages that the candidate does not name, which could make exactly what is wrong
    case               the failing case: name, sizes, seed, dtype, device, threads, strides
    partial            why there is less than there could be: the budget, or an interrupt
    """

    verdict: str
    report: Report
    first_wrong_stage: str | None = None
    location: Location | None = None
    causes: list[Cause] = field(default_factory=list)
    stages: list[StageState] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    case: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    partial: str = ""
    evidence: Evidence | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        return self.verdict == PASS

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the report among them; tensors are left to the bundle."""
        return {
            "verdict": self.verdict,
            "first_wrong_stage": self.first_wrong_stage,
            "location": plain_json(asdict(self.location)) if self.location is not None else None,
            "causes": [plain_json(asdict(c)) for c in self.causes],
            "stages": [plain_json(asdict(s)) for s in self.stages],
            "suspects": list(self.suspects),
            "case": plain_json(self.case),
            "seconds": self.seconds,
            "partial": self.partial,
            "report": self.report.to_json(),
        }

    def __str__(self) -> str:
        from .text import render

        return render(self)


def diagnose(
    target: Target,
    case: Case | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    probes: str | Sequence[str] = "all",
    budget_s: float | None = 60.0,
) -> Diagnosis:
    """Find the first wrong stage of a target and rank the causes that fit. Never raises for a wrong kernel.

    case      a Case, its name, or None: cases are tried until one fails, those with a size of 0 or 1 last
    probes    as in `check`; the cheap ones go first, the others where those find nothing
    budget_s  seconds in all; half of them, at most, to find a case that fails. None: as long as it takes

    Returns a Diagnosis; an interrupt from the keyboard ends it with what is known, marked partial. Raises TargetError
    for a mistake in the declaration.
    """
    if not isinstance(target, Target):
        raise TypeError(f"diagnose: expected an assay.Target, got {type(target).__name__}")
    if budget_s is not None and budget_s <= 0:
        raise TargetError(f"budget_s: expected a positive number of seconds or None, got {budget_s}")
    selected = catalogue.select(probes if isinstance(probes, str) else tuple(probes))
    started = time.perf_counter()
    cases = _informative(list(target.cases)) if case is None else [target.case(case)]
    report, sessions = _failing(target, cases, dtype, device, seed, selected, budget_s)
    found = Diagnosis(report.verdict, report)
    failing = next((s for s in sessions if s.problems or _wrong(s)), None)
    if failing is not None:
        found.case = described(failing)
        _explain(found, failing, started, budget_s)
    found.seconds = time.perf_counter() - started
    return found


def _informative(cases: list[Case]) -> list[Case]:
    """In the order given, those with a size of 0 or 1 last: they show a fault, but not its pattern."""
    return sorted(cases, key=lambda c: any(isinstance(v, int) and v <= 1 for v in c.sizes.values()))


def _failing(
    target: Target, cases: list[Case], dtype: torch.dtype | None, device: str | torch.device, seed: int,
    selected: frozenset[str], budget_s: float | None,
) -> tuple[Report, list[Session]]:  # fmt: skip
    """The check that fails, cheap probes on all cases first; the last one where none does."""
    quick = selected & frozenset(catalogue.QUICK)
    share = None if budget_s is None else _CHECKING * budget_s / 2
    report, sessions = examine(target, cases, dtype, device, seed, quick, share, until_failing=True)
    if report.verdict != PASS or quick == selected:
        return report, sessions
    return examine(target, cases, dtype, device, seed, selected, share, until_failing=True)


def _wrong(session: Session) -> bool:
    return any(f.rung != "QUALITY" for f in session.findings)


def _explain(found: Diagnosis, session: Session, started: float, budget_s: float | None) -> None:
    def spent() -> bool:
        return budget_s is not None and time.perf_counter() - started > budget_s

    state = torch.random.get_rng_state()
    try:
        evidence, table = collect(session, found.report, repeats=_REPEATS, spent=spent)
    except KeyboardInterrupt:
        found.partial = "interrupted"
        return
    finally:
        torch.random.set_rng_state(state)
    if spent():
        found.partial = f"the budget of {budget_s:g} s was spent"
    found.evidence, found.stages, found.suspects = evidence, table.stages, table.suspects
    found.first_wrong_stage, found.location = evidence.first_wrong, evidence.location
    if found.verdict == REFERENCE_FAULT:
        found.first_wrong_stage = None
    found.causes = rank(evidence) if found.verdict in (FAIL, REFERENCE_FAULT) else []
