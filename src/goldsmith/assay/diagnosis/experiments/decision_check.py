"""Examines a decision that is reported as the first wrong stage: is it wrong?"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...judge.examination import Examination, decided
from ..facts.evidence import CULPRIT, OK, Evidence


def examine_decision(examination: Examination, evidence: Evidence) -> None:
    """For a right decision, adds the first wrong stage of another run to the evidence.

    A decision may fail only in another run, for example with large inputs. Then it merely follows from the first wrong
    stage of that run.
    """
    name = evidence.first_wrong or ""
    if name not in examination.target.decisions or examination._first is None or examination._ref is None:
        return
    got, golden = decided(examination.first, name), examination.ref.values.get(name)
    if got is None or golden is None or got.shape != golden.shape:
        return
    if not torch.equal(got.double(), golden.double()):
        return
    if evidence.tensor == name and evidence.got is None:
        evidence.got, evidence.golden, evidence.stored = got.double(), golden.double(), str(got.dtype)[6:]
    first = next((fact.first for fact in evidence.runs.values() if fact.first), "")
    if evidence.stage(first) is not None:
        evidence.first_wrong = first
        evidence.stages = [
            replace(s, state=OK, text="right as it is") if s.name == name and s.state == CULPRIT else s
            for s in evidence.stages
        ]
