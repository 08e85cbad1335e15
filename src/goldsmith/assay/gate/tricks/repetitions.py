"""The same call under other circumstances: what a wrong result has to do with earlier calls, or with ones.

A kernel that computes gives the same result alone in a new process as after other calls. A backward that leaves out its
output gradient is right where that is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...execute.records import CandidateRun, RunSettings
from ...judge import ladder
from ...judge.agreement import same_bits
from ...judge.examination import Examination
from ...report.results import Finding
from ..isolation.candidate_process import CandidateProcess

_CALLS = 3  # to repeat alone
_CLOSE = 1e-3  # relative: differences of legal orders are smaller
_ROUGH = 1e-2  # relative: a smaller error is one of precision, or a small factor


def of_earlier_calls(process: CandidateProcess) -> tuple[str, str] | None:
    """(trick, sentence) if one of the last calls gives another result alone in a new process, twice the same one."""
    for material, settings, recorded in list(process.recorded)[: -_CALLS - 1 : -1]:
        once = process.alone(material, settings)
        names = _apart(once, recorded)
        if names and not _apart(once, process.alone(material, settings)):
            text = f"alone in a new process, a call gives another {names[0]} than after other calls"
            return ("backward_shortcut" if all(n.endswith(".grad") for n in names) else "cached_result"), text
    return None


def of_ones(examination: Examination, findings: Sequence[Finding], process: CandidateProcess) -> tuple[str, str] | None:
    """(trick, sentence) if only gradients are wrong, and these are right for output gradients of 1.

    That shows nothing where half of the gradient would pass as well, as for a softmax, where the right one is 0. But a
    backward that returns the same for other output gradients leaves them out.
    """
    wrong = {f.tensor for f in findings if f.probe in ("values", "ensemble", "statistics")}
    if not wrong or not all(name.endswith(".grad") for name in wrong):
        return None
    sent = {n: torch.ones_like(t) for n, t in examination.first.outputs.items() if n in examination.first.cotangents}
    run = process(examination.material, RunSettings(cotangents=sent))
    references = examination.references(examination.material, run)
    for name in wrong:
        against, golden = references.reference(name, "grad", noise=False), examination.ref.values.get(name)
        usual, grad = examination.first.grads.get(name), run.grads.get(name)
        if against is None or usual is None or grad is None or _close(usual.double(), golden, _ROUGH):
            return None
        if not ladder.judge(name, grad, against).ok:
            return None
        if not same_bits(usual, grad) and ladder.judge(name, grad / 2, against).ok:
            return None
    return "backward_shortcut", f"{', '.join(sorted(wrong))} would be right if every output gradient were 1"


def _apart(a: CandidateRun, b: CandidateRun) -> list[str]:
    """Names of the results that differ by more than legal orders do."""
    first, second = ({**run.outputs, **run.grads} for run in (a, b))
    return [name for name in first.keys() & second.keys() if not _close(first[name], second[name])]


def _close(a: Tensor | None, b: Tensor | None, share: float = _CLOSE) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).norm()) <= share * max(float(a.norm()), float(b.norm()))
