"""A failing session's evidence: the stage table first, then what the first wrong tensor looks like, then other runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ladder
from ..bounds import SLACK
from ..results import QUALITY, REFERENCE_FAULT, RUNGS, Finding, Location, Report
from ..run import Run
from ..session import Session
from .evidence import Evidence, MemoryFact
from .fits import fit
from .influence import influence
from .isolate import Isolation, isolate, named
from .runs import facts

_MEMORY = (
    ("guard", " bytes written ", "overrun"),
    ("guard", "", "stray_read"),
    ("alias", "which the forward returned", "output_modified"),
    ("alias", "was modified", "input_modified"),
    ("alias", "shares memory", "aliased"),
    ("poison", "", "never_written"),
)


def collect(
    session: Session, report: Report, *, repeats: int = 3, spent: Callable[[], bool] = lambda: False
) -> tuple[Evidence, Isolation]:
    """Everything about a session whose check has failed, and its stage table.

    In order of what it usually tells; what `spent()` leaves no time for is left out, and the table is always made.
    """
    evidence = Evidence(
        report,
        memory=_memory(report),
        scalars={n: v for n, v in session.material.scalars.items()},
        sizes=dict(session.material.sizes),
        dtype=str(session.dtype).removeprefix("torch."),
    )
    first = _finding(report)
    if first is not None:
        evidence.tensor, evidence.location = first.tensor, first.location
    if report.verdict == REFERENCE_FAULT or first is None:
        return evidence, Isolation()
    if session._first is None or session.first.error is not None or session._ref is None:
        return _raised(session, evidence), Isolation()
    table = isolate(session)
    evidence.stages, evidence.first_wrong = table.stages, table.first_wrong or first.tensor
    if table.first_wrong is not None:
        _first_wrong(session, evidence, table)
    evidence.other = _others(session, table.own or session.first, evidence.tensor)
    if not spent():
        evidence.runs, _ = facts(session, repeats=repeats, spent=spent)
    if not spent() and table.first_wrong is not None:
        known = table.first_wrong in named(session.first) and not table.suspects
        looked = {table.first_wrong} if known else session.bad | {table.first_wrong}
        evidence.influence = influence(session, looked, spent=spent)
    return evidence, table


def _finding(report: Report) -> Finding | None:
    """The surest finding; of the golden before all others."""
    failing = [f for f in report.findings if f.rung != QUALITY]
    return min(failing, key=lambda f: (f.probe != "golden", RUNGS.index(f.rung)), default=None)


def _raised(session: Session, evidence: Evidence) -> Evidence:
    """The candidate raised before there was anything to compare."""
    done = session._first
    if done is not None and done.error is not None:
        said = (str(done.error).strip().splitlines() or [""])[0]
        evidence.error = f"{type(done.error).__name__}: {said}"[:300]
        evidence.first_wrong = evidence.tensor = done.phase
    return evidence


def _first_wrong(session: Session, evidence: Evidence, table: Isolation) -> None:
    """The wrong tensor as it comes from right inputs where it could be isolated, else from the candidate's own run."""
    name = table.first_wrong or ""
    state = evidence.stage(name)
    own = table.own or session.first
    isolated = table.run is not None and name in named(table.run) and state is not None and state.isolated is not None
    done = table.run if isolated and table.run is not None and state is not None and state.state == "culprit" else own
    kind, got = named(done).get(name, ("stage", None))
    against = session.ref.reference(name, kind, noise=False)
    evidence.tensor, evidence.location = name, None
    if against is None:
        return
    evidence.golden = against.bounded.value
    if got is None:
        return
    evidence.got = got.detach().double()
    evidence.location = _location(evidence.got, against)
    found = fit(session, name, kind, got)
    evidence.fits, evidence.ratios, evidence.permutations = found.fits, found.ratios, found.patterns


def _location(got: Tensor, against: ladder.Reference) -> Location | None:
    bounded = against.bounded
    if got.shape != bounded.value.shape:
        return None
    same = torch.isnan(got) & torch.isnan(bounded.value) | (got == bounded.value)
    wrong = ~((got - bounded.value).abs() <= SLACK * bounded.bound) & ~same
    return ladder.locate(against.name, wrong, against) if bool(wrong.any()) else None


def _others(session: Session, own: Run, tensor: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The other results, candidate and golden."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, _, got in own.results():
        golden = session.ref.values.get(name)
        if name != tensor and got is not None and golden is not None and golden.shape == got.shape:
            found[name] = got.detach().double(), golden.double()
    return found


def _memory(report: Report) -> list[MemoryFact]:
    found = []
    for f in report.findings:
        for probe, words, kind in _MEMORY:
            if f.probe == probe and words in f.text:
                found.append(MemoryFact(kind, f.tensor, f.text, f.location))
                break
    return found


def described(session: Session) -> dict[str, Any]:
    """What makes the case again: its name, sizes, seed, dtype, device, threads and the inputs' layouts."""
    inputs = session.material.inputs
    return {
        "name": session.case.name,
        "sizes": dict(session.material.sizes),
        "seed": session.seed,
        "dtype": str(session.dtype).removeprefix("torch."),
        "device": str(session.device),
        "threads": torch.get_num_threads(),
        "strides": {n: list(t.stride()) for n, t in inputs.items()},
    }
