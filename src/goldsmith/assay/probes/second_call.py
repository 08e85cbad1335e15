"""Repeated calls: on dirty memory, with the backward run twice, with another call between forward and backward.

Finds faults that a first call on fresh memory hides: accumulators that expect zeros, workspaces that are not reset,
results cached by shape, weights copied once, gradients that a backward destroys. A graph that calls a kernel twice runs
both forwards before both backwards, as this probe does, so the next forward must not overwrite what a backward needs.

    forward A, forward B, backward B, backward A        each judged by its own golden
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..execute.memory_marks import DIRT_FILL
from ..execute.records import CandidateRun, Material, RunSettings
from ..judge.agreement import Difference, difference
from ..judge.examination import Examination
from ..report.results import CERTAIN, STATISTICAL
from . import decisions, maps, values

NAME, INTERLEAVED = "second_call", "interleaved"
DIRTY = "the second call with the same inputs, on memory that holds other bytes, gives another result"
BETWEEN = "with a call of other inputs between forward and backward the result is another: state that calls share"
BACK = "after a call with other inputs, the first inputs give another result"


def run(examination: Examination) -> None:
    dirty = examination.execute(NAME, NAME, RunSettings(fill=DIRT_FILL, backward_twice=True, fresh=False))
    if examination.raised(NAME, "the second call, same inputs", dirty):
        return
    agree(examination, NAME, NAME, dirty, DIRTY)
    if dirty.second_grads is not None:
        _backward_twice(examination, dirty)
    _interleaved(examination)
    back = examination.execute(NAME, "back", RunSettings(fresh=False))
    if not examination.raised(NAME, "the first inputs again, after others", back):
        agree(examination, NAME, "back", back, BACK)
    examination.repeated += 2 if examination.target.reset is not None else 3  # none of these runs called reset


def _interleaved(examination: Examination) -> None:
    """Make and judge a whole call with other inputs between the forward and backward of the first ones."""
    material = examination.variant(1)
    how = RunSettings(fresh=False, between=material, earlier=examination.key)
    run = examination.execute(NAME, INTERLEAVED, how)
    if run.between is not None:
        _judge_others(examination, material, run.between)
    for name, apart in _lost(examination.first, run.earlier).items():
        where = None if apart.mask is None else examination.locate(name, apart.mask)
        text = f"a later call overwrote what the first returned: {apart.text}"
        examination.find(CERTAIN, NAME, name, text, where=where, kind="overwritten_result")
    label = "the first inputs, with a call of other inputs between forward and backward"
    if not examination.raised(NAME, label, run, called=INTERLEAVED):
        agree(examination, NAME, INTERLEAVED, run, BETWEEN)


def agree(examination: Examination, probe: str, label: str, run: CandidateRun, text: str) -> bool:
    """Whether a run of the same inputs has the bits of the first, or differs within the noise (a note)."""
    if not examination.same_decisions(run):
        settled = decisions.settle(examination, run, examination.references(examination.material, run))
        skip = frozenset(examination.bad)
        return not values.judge(examination, run, settled, probe, label, noise=False, repeat=None, skip=skip)
    names = {n: t for n, _, t in examination.first.results()}
    good = True
    for name, kind, tensor in run.results():
        if name in examination.bad:
            continue
        reference = examination.ref.reference(name, kind)
        apart = difference(names.get(name), tensor, reference)
        if apart.equal:
            continue
        if apart.legal:
            message = f"{name} differs between runs, within the noise of legal orders ({apart.text})"
            examination.note("order_nondeterminism", name, message)
            continue
        good = False
        where = None if apart.mask is None else examination.locate(name, apart.mask)
        rung = CERTAIN if apart.certain else STATISTICAL
        message = f"{text}: {apart.text} ({label})"
        examination.find(rung, probe, name, message, where=where, measured=apart.measured, limit=apart.limit,
                         kind="differs", run=label)  # fmt: skip
        if tensor is not None:
            maps.draw_one(examination, label, kind, tensor, examination.ref, name)
    return good


def _lost(first: CandidateRun, now: Mapping[str, Tensor]) -> dict[str, Difference]:
    """Returned results and gradients of the first run that a later call overwrote; now: as their memory holds them."""
    copies = {**first.outputs, **{n: g for n, g in first.grads.items() if g is not None}}
    apart = {n: difference(copies[n], t, None) for n, t in now.items() if n in copies}
    return {n: change for n, change in apart.items() if not change.equal}


def _backward_twice(examination: Examination, run: CandidateRun) -> None:
    for name, grad in run.grads.items():
        again = (run.second_grads or {}).get(name)
        apart = difference(grad, again, examination.ref.reference(name, "grad"))
        if not apart.equal and not apart.legal and name not in examination.bad:
            where = None if apart.mask is None else examination.locate(name, apart.mask)
            examination.find(
                CERTAIN,
                NAME,
                name,
                f"the backward run twice on one graph gives another gradient: {apart.text}",
                where=where,
                kind="backward_twice",
            )
            if again is not None:
                maps.draw_one(examination, "backward twice", "grad", again, examination.ref, name)


def _judge_others(examination: Examination, material: Material, run: CandidateRun) -> None:
    """Judge other values of the same shapes by their own golden, which shows a result cached by shape."""
    if examination.raised(NAME, "other inputs of the same shapes", run):
        return
    plain = examination.references(material, run)
    settled = decisions.settle(examination, run, plain)
    values.judge(
        examination, run, settled, NAME, "other inputs", noise=False, repeat=None, skip=frozenset(examination.bad)
    )
