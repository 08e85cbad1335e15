"""The golden's operators that a tensor is made of, if no search among changed goldens has recorded them."""

from __future__ import annotations

from ...judge.examination import Examination
from ..causes.rules.reading import Reading, label, plain
from ..facts.evidence import Evidence
from ..graph.golden import Golden
from ..graph.node import behind
from ..graph.recording import Listening


def tensor_operators(examination: Examination, evidence: Evidence) -> frozenset[str]:
    """Their names, from one run of the golden; empty if no rule needs them."""
    if evidence.operators:
        return evidence.operators
    lowered = any(plain(label(f)) == "offset" for f in evidence.report.findings)
    if not (lowered and not Reading(evidence).plain_wrong or evidence.stored in ("bool", "int64", "int32", "int16")):
        return frozenset()
    mode = Listening().record()
    tensor = Golden(examination.ref).run_under(mode, examination.ref.leaves, evidence.tensor).get(evidence.tensor)
    calls, key = mode.calls or [], -1 if tensor is None else mode.key_of(tensor)
    indices = set(range(len(calls))) if key == -1 else behind(calls, key)
    return frozenset(call.name for call in calls if call.index in indices)
