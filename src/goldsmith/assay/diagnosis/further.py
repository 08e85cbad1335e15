"""What a check has no time for: calls of other sizes in between, and more threads. Tried where all else was right."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.tracing import TargetError
from ..declare.case import Case
from ..execute.run import Material, RunSettings
from ..golden.golden_results import GoldenError
from ..judge.examination import Ended, Session
from ..probes import decisions, values
from .evidence import RunFact
from .kept import Kept
from .runs import facts, first_in

_CASES, _THREADS = 3, (4, 8)


def further(session: Session, others: list[Case], *, spent: Callable[[], bool]) -> dict[str, RunFact]:
    """The runs in which a session whose check has passed fails after all; its findings say how."""
    found: dict[str, RunFact] = {}
    try:
        values.run(session)
        for case in others[:_CASES]:
            if not found and not spent():
                material = session.draw(case)
                _judged(session, found, "second_call", f"other sizes: {case.name}", RunSettings(fresh=False), material)
                if not found:  # and once with the other sizes first, from a fresh start
                    session.execute("second_call", "other sizes", RunSettings(), material, look=False)
                    _judged(session, found, "second_call", "other sizes", RunSettings(fresh=False))
        if session.material.device.type == "cpu":
            for count in _THREADS:
                if not found and count != torch.get_num_threads() and not spent():
                    _judged(session, found, "repeats", f"{count} threads", RunSettings(threads=count))
    except (Ended, GoldenError, TargetError):
        return {}
    return found


def afresh(session: Session, kept: Kept) -> dict[str, RunFact]:
    """The case with nothing kept from the cases before it; {} where nothing is, or where that run says nothing."""
    if not kept.changed or session._first is None or session.first.error is not None:
        return {}
    with kept.forgotten():
        return facts(session, only=("fresh start",))[0]


def _judged(
    session: Session,
    found: dict[str, RunFact],
    probe: str,
    label: str,
    how: RunSettings,
    material: Material | None = None,
) -> None:
    done = session.execute(probe, label, how, material)
    wrong: set[str] = set()
    ref = session.ref
    if not session.raised(probe, label, done):
        if material is not None or not session.same_decisions(done):
            ref = decisions.settle(session, done, session.references(material or session.material, done))
        wrong = values.judge(session, done, ref, probe, label, noise=False, repeat=None, skip=frozenset(session.bad))
    if wrong or done.error is not None:
        error = "" if done.error is None else f"{type(done.error).__name__}: {done.error}"[:200]
        first = first_in(session, done, ref, sorted(wrong)) if wrong else ""
        found[label] = RunFact(label, tuple(sorted(wrong)), False, error=error, first=first)
