"""Submission: a candidate as it was handed in, with what its format says about it."""

from __future__ import annotations

from dataclasses import dataclass

from ..candidate import Candidate
from ..verdict import Verdict


@dataclass(frozen=True)
class Submission:
    """candidate    its source
    problem      name of the problem that it says it solves; None if it does not say
    verdict    why it was refused before it ran; None in general
    """

    candidate: Candidate
    problem: str | None = None
    verdict: Verdict | None = None


def refused(name: str, reason: str, text: str) -> Submission:
    verdict = Verdict(candidate=name, status="refused", reason=reason, evidence=[text])
    return Submission(Candidate(name=name, source=""), verdict=verdict)
