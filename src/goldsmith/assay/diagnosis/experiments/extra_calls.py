"""More runs, if a check finds nothing wrong: calls of other sizes in between, and more threads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....core.tracing import TargetError
from ...declare.case import Case
from ...execute.records import Material, RunSettings
from ...golden.golden_error import GoldenError
from ...judge.examination import Ended, Examination
from ...probes import decisions, values
from ...support.candidate_state import CandidateState
from ..facts.evidence import RunFact
from .runs import facts, first_in, judged_run

_CASES, _THREADS = 3, (4, 8)


def extra_calls(
    examination: Examination, others: list[Case], state: CandidateState, *, spent: Callable[[], bool]
) -> dict[str, RunFact]:
    """The runs that fail although the check has passed, by name; adds findings about them to the examination.

    A case that is wrong by itself, without any earlier call, tells nothing about state between calls.
    """
    failures: dict[str, RunFact] = {}
    try:
        values.run(examination)
        for case in others[:_CASES]:
            if not failures and not spent():
                material, known = examination.draw(case), len(examination.findings)
                _judged(
                    examination,
                    failures,
                    "second_call",
                    f"other sizes: {case.name}",
                    RunSettings(fresh=False),
                    material,
                )
                if failures and not _right_alone(examination, state, material):
                    failures.clear()
                    del examination.findings[known:]
                    examination.maps.clear()
                    continue
                if not failures:  # once more, with the other sizes first, from a fresh start
                    examination.execute("second_call", "other sizes", RunSettings(), material, look=False)
                    _judged(examination, failures, "second_call", "other sizes", RunSettings(fresh=False))
        if examination.material.device.type == "cpu":
            for count in _THREADS:
                if not failures and count != torch.get_num_threads() and not spent():
                    _judged(examination, failures, "repeats", f"{count} threads", RunSettings(threads=count))
    except (Ended, GoldenError, TargetError):
        return {}
    return failures


def _right_alone(examination: Examination, state: CandidateState, material: Material) -> bool:
    """True if a case is right in a first call."""
    with state.cleared():
        fact = judged_run(examination, "other sizes alone", RunSettings(), material)
    return fact is None or fact.right


def fresh_start(examination: Examination, state: CandidateState) -> dict[str, RunFact]:
    """The case without state from earlier cases; {} if there is no state, or if that run says nothing."""
    if not state.changed or examination._first is None or examination.first.error is not None:
        return {}
    with state.cleared():
        return facts(examination, only=("fresh start",))


def _judged(
    examination: Examination,
    failures: dict[str, RunFact],
    probe: str,
    label: str,
    how: RunSettings,
    material: Material | None = None,
) -> None:
    run = examination.execute(probe, label, how, material)
    wrong: set[str] = set()
    ref = examination.ref
    if not examination.raised(probe, label, run):
        if material is not None or not examination.same_decisions(run):
            ref = decisions.settle(examination, run, examination.references(material or examination.material, run))
        wrong = values.judge(
            examination, run, ref, probe, label, noise=False, repeat=None, skip=frozenset(examination.bad)
        )
    if wrong or run.error is not None:
        error = "" if run.error is None else f"{type(run.error).__name__}: {run.error}"[:200]
        first = first_in(examination, run, ref, sorted(wrong)) if wrong else ""
        failures[label] = RunFact(label, tuple(sorted(wrong)), False, error=error, first=first)
