"""The diagnosis of a wrong candidate in a sentence, with the candidate in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from ...core.tracing import TargetError
from ..declare.target import Target
from ..diagnosis.driver import Diagnosis, diagnose
from ..report.results import FAIL
from .isolation.candidate_process import CandidateEnded, CandidateProcess

BUDGET = 20.0  # seconds, for all but the last call; a small candidate takes 4
UNEXPLAINED = "not explained"


def explained(process: CandidateProcess, load: Callable[[CandidateProcess], Target], device: str, seed: int) -> str:
    """The likeliest cause with its score, or "not explained" and why.

    load: the target whose candidate that process imports.
    """
    try:
        return sentence(diagnose(load(process), device=device, seed=seed, budget_s=BUDGET))
    except CandidateEnded as ended:
        return f"{UNEXPLAINED}: the diagnosis ended early, {ended.text}"
    except TargetError as error:
        return f"{UNEXPLAINED}: {error}"
    finally:
        process.close()


def sentence(diagnosis: Diagnosis) -> str:
    """The first cause of a diagnosis and its score."""
    if diagnosis.verdict != FAIL:
        return f"{UNEXPLAINED}: the diagnosis, which draws other inputs, found nothing wrong"
    if not diagnosis.causes:
        more = f", {diagnosis.partial}" if diagnosis.partial else ""
        return f"{UNEXPLAINED}{more}"
    best = diagnosis.causes[0]
    if best.likely:
        return f"{UNEXPLAINED}; similar known faults: {best.guess}"
    return f"{best.headline} ({best.id}, score {best.score:.2f})"
