"""Many plain calls, as a user makes them: no guard bands, no modes, the same tensors with changing numbers.

Finds what a run with guard bands hides: results kept by address, identity, shape or version of an input; the right
result for the first calls only, or for calls that look like a check; writes after the return. A case that is wrong
already is not tried, unless its candidate is doubtful: then the way it goes wrong may show a trick.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..execute.records import CandidateRun, Material, PlainCalls, PlainResults, RunSettings
from ..golden.golden_results import GoldenResults
from ..judge.agreement import difference, same_bits
from ..judge.examination import Examination
from ..report.results import CERTAIN
from . import decisions, values

NAME = "calls"
CALLS = 200  # as many as fit into the time that PlainCalls allows
_DRAWS = 2  # of numbers; the second is that of the probe of second calls, so that its golden is known
_DOUBTFUL_DRAWS = 8  # where a candidate may be right for most numbers only
_LARGE = 1 << 20  # bytes of inputs from which two draws must do


def run(examination: Examination) -> None:
    if any(f.probe == "guard" for f in examination.findings):
        return  # without guard bands, a stray write ends the process
    doubtful = getattr(examination.target.runner, "doubtful", False)
    if examination.findings and not doubtful:
        return
    size = sum(t.numel() * t.element_size() for t in examination.material.inputs.values())
    draws = _DOUBTFUL_DRAWS if doubtful and size < _LARGE else _DRAWS
    others = tuple(examination.variant(k) for k in range(1, draws))
    materials = (examination.material, *others)
    shown = {n.removeprefix("saved.") for n in examination.first.outputs}
    hidden = [n for n in examination.target.decisions if n not in shown]  # stages, which plain calls do not record
    if hidden or not all(_alike(examination.material, m) for m in others):
        others, materials = (), (examination.material,)
    order = random.Random(examination.seed)
    schedule = [0, *range(len(others), 0, -1)]
    schedule += [order.randrange(len(materials)) for _ in range(CALLS - len(schedule))]
    backward = tuple(schedule.index(k) for k in range(len(materials)))
    how = RunSettings(fresh=False, plain=PlainCalls(others, tuple(schedule), backward))
    run = examination.execute(NAME, "plain calls", how, look=False)
    if examination.raised(NAME, "plain calls", run) or run.plain is None:
        return
    for number, name in run.plain.late:
        text = f"{name} of plain call {number + 1} changed after the call had returned"
        examination.find(CERTAIN, NAME, name, text, trick="late_write", kind="late_write")
    _judge(examination, materials, schedule, run.names, run.plain)


def _alike(a: Material, b: Material) -> bool:
    """Whether the numbers of one fit into the tensors of the other."""
    return a.scalars == b.scalars and all(
        n in b.inputs and b.inputs[n].shape == t.shape and b.inputs[n].dtype == t.dtype for n, t in a.inputs.items()
    )


def _judge(
    examination: Examination, materials: tuple[Material, ...], schedule: list[int], names: tuple[str, ...],
    plain: PlainResults,
) -> None:  # fmt: skip
    """Judges the first call of each draw by the golden, and all others by the first."""
    first: dict[int, int] = {}
    references: dict[int, GoldenResults] = {}
    for number, outputs in enumerate(plain.outputs):
        which = schedule[number]
        if which in first:
            _agrees(examination, plain, schedule, first[which], number, references[which])
            continue
        first[which] = number
        grads = plain.grads.get(number, {})
        first_run = examination.first
        run = CandidateRun(names, outputs, grads, stages=first_run.stages, saved=first_run.saved)
        run.cotangents = plain.cotangents.get(number, {})
        settled = decisions.settle(examination, run, examination.references(materials[which], run))
        references[which] = settled
        before = len(examination.findings)
        label = f"plain call {number + 1}"
        values.judge(examination, run, settled, NAME, label, noise=False, repeat=None, skip=frozenset(examination.bad))
        fresh = examination.findings[before:]
        if fresh:
            trick = _trick(examination, before, materials[which], number, {**outputs, **grads})
            examination.findings[before:] = [replace(f, trick=trick) for f in fresh]


def _trick(
    examination: Examination, before: int, material: Material, number: int, results: Mapping[str, Tensor | None]
) -> str:
    """What a wrong first call of a draw shows. before: the findings of earlier calls.

    The base numbers were right under guard bands. Other numbers are run there now: if the results are the same, they
    are just wrong; if not, earlier calls matter.
    """
    if number == 0 or any(f.probe == NAME and f.trick == "shape_branch" for f in examination.findings[:before]):
        return "shape_branch"
    run = examination.execute(NAME, "the numbers of a wrong plain call", material=material, look=False)
    references = examination.references(material, run)
    for name, kind, tensor in run.results():
        if name not in results or name in examination.target.decisions:
            continue
        if not difference(tensor, results[name], references.reference(name, kind)).legal:
            return "cached_result"
    return ""


def _agrees(
    examination: Examination,
    plain: PlainResults,
    schedule: list[int],
    first: int,
    number: int,
    reference: GoldenResults,
) -> None:
    """Compares a call with an earlier one of the same numbers."""
    for name, tensor in plain.outputs[number].items():
        before = plain.outputs[first].get(name)
        if name in examination.bad or name in examination.target.decisions or same_bits(before, tensor):
            continue
        apart = difference(before, tensor, reference.reference(name, "output"))
        if apart.legal:
            continue
        stale = next((k for k in _others(schedule, number) if _equal(plain, k, name, tensor)), None)
        text = f"plain call {number + 1} gives another result than call {first + 1} of the same numbers: {apart.text}"
        if stale is not None:
            text += f"; it is the result of call {stale + 1}, whose numbers are others"
        where = None if apart.mask is None else examination.locate(name, apart.mask)
        trick = "call_count" if stale is None else "cached_result"
        examination.find(CERTAIN, NAME, name, text, where=where, trick=trick, kind="call_differs")


def _others(schedule: list[int], number: int) -> list[int]:
    return [k for k in range(number) if schedule[k] != schedule[number]]


def _equal(plain: PlainResults, number: int, name: str, tensor: Tensor) -> bool:
    return same_bits(plain.outputs[number].get(name), tensor)
