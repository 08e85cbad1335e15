"""Which operators of the golden a tensor is made of, where no search among changed goldens has listened to it."""

from __future__ import annotations

from ..judge.examination import Examination
from .evidence import Evidence
from .rules.reading import Reading, label, plain
from .whatif.run.calls import Listening, behind
from .whatif.run.golden import Golden


def made_of(examination: Examination, evidence: Evidence) -> frozenset[str]:
    """Their names; one run of the golden, and none where no rule asks."""
    if evidence.operators:
        return evidence.operators
    lowered = any(plain(label(f)) == "offset" for f in evidence.report.findings)
    if not (lowered and not Reading(evidence).plain_wrong or evidence.stored in ("bool", "int64", "int32", "int16")):
        return frozenset()
    mode = Listening().record()
    made = Golden(examination.ref).run_under(mode, examination.ref.leaves, evidence.tensor).get(evidence.tensor)
    calls, key = mode.calls or [], -1 if made is None else mode.key_of(made)
    indices = set(range(len(calls))) if key == -1 else behind(calls, key)
    return frozenset(call.name for call in calls if call.index in indices)
