"""Tests whether the candidate notices a changed input. A copy cached by address, sum or first element is stale then.

reordered   one input's numbers in another order, written into the same tensor between two calls: address, shape, first
            and last element, sum and maximum stay the same. Or written into a new tensor with the id of the old one.
            Indices and masks get the values of another draw, since reordered ones may be invalid
small       all inputs times 2^-12, and one of them moved a little: values that are flushed to zero or rounded to fixed
            steps stay bit-identical, values with an epsilon move
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ...bounds.bounded import SLACK
from ...execute.memory_marks import ZERO_FILL
from ...execute.records import SAME_ID, SAME_MEMORY, KeptInputs, Material, RunSettings
from ...golden.golden_error import GoldenError
from ...golden.golden_results import GoldenResults
from ...judge.examination import Examination
from ...probes.slices import own_decisions
from ..causes.rules.reading import Reading
from ..facts.evidence import Evidence
from .runs import changed, nudge

PROBE = "kept inputs"
_SMALL = 2.0**-12
_MOST = 4  # inputs to examine
_HALF = 0.5  # share of the elements that the golden moves and the candidate does not


def examine_stale_inputs(
    examination: Examination, evidence: Evidence, spent: Callable[[], bool] = lambda: False
) -> None:
    """Run both tests on a case if its evidence gives a reason to."""
    r = Reading(evidence)
    if not r.plain_wrong or any(not fact.same for fact in r.runs("repeat")) or r.right("second call"):
        evidence.kept = stale_inputs(examination, spent)
    if not r.plain_wrong and not evidence.kept and r.fails("scale 2^-12") is not None:
        evidence.deaf = unmoved_shares(examination, spent)


def stale_inputs(examination: Examination, spent: Callable[[], bool] = lambda: False) -> dict[str, str]:
    """Input -> a sentence, if other numbers at the same address give the first result bit for bit.

    Costs four runs of the candidate's forward for every floating input, and for all other inputs together, which may
    only be valid together. Each wrong result that stays the same costs one more, and one run of the golden.
    """
    sentences: dict[str, str] = {}
    for other in _others(examination):
        if spent() or examination.target.mutates:
            break
        same = all(torch.equal(t, examination.material.inputs[n]) for n, t in other.items())
        sentence = None if same else _stale(examination, other)
        if sentence is not None:
            sentences |= dict.fromkeys(other, sentence)
    return sentences


def _others(examination: Examination) -> Iterator[dict[str, Tensor]]:
    """Other numbers for the inputs: floating ones reordered, indices and masks from another draw."""
    for name, tensor in _inputs(examination):
        yield {name: reordered(tensor)}
    mine = {n: t for n, t in examination.material.inputs.items() if not t.is_floating_point() and t.numel()}
    drawn = examination.variant(1).inputs if mine else {}
    if mine and all(n in drawn and drawn[n].shape == t.shape and drawn[n].dtype == t.dtype for n, t in mine.items()):
        yield {n: drawn[n] for n in mine}


def unmoved_shares(examination: Examination, spent: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Input -> share of the elements that it moves in the golden and not in the candidate, with all inputs small.

    Costs one run of candidate and golden, and one of each for every floating input.
    """
    small = changed(examination.material, lambda t: t * _SMALL)
    unmoved = {}
    before = _with_references(examination, small)
    for name, _ in _inputs(examination):
        if spent() or before is None:
            break
        after = _with_references(examination, small.with_inputs({name: nudge(small.inputs[name])}))
        shares = [] if after is None else list(_shares(before, after))
        if shares:
            unmoved[name] = max(shares)
    return {name: share for name, share in unmoved.items() if share > _HALF}


def reordered(tensor: Tensor) -> Tensor:
    """All numbers except the first and last, moved on by one place."""
    flat = tensor.detach().flatten().clone()
    if len(flat) > 3:
        flat[1:-1] = flat[1:-1].roll(1)
    return flat.view(tensor.shape)


def _inputs(examination: Examination) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in examination.material.inputs.items() if t.is_floating_point() and t.numel() > 3][:_MOST]


def _stale(examination: Examination, other: Mapping[str, Tensor]) -> str | None:
    moved = examination.material.with_inputs(dict(other))
    try:
        ref = examination.references(moved, examination.first, own_decisions(examination, examination.first))
        for how in (SAME_MEMORY, SAME_ID):
            sentence = _stays(examination, ref, moved, tuple(other), how)
            if sentence is not None:
                return sentence
    except Exception:  # noqa: BLE001 - a wrong kernel may raise whatever it likes, and then says nothing here
        return None
    return None


def _stays(
    examination: Examination, ref: GoldenResults, moved: Material, names: tuple[str, ...], how: str
) -> str | None:
    dense = {n: examination.material.inputs[n].clone(memory_format=torch.contiguous_format) for n in names}
    key = uuid.uuid4().hex
    first = _forward(examination, examination.material.with_inputs(dense), KeptInputs(key))
    second = _forward(examination, moved, KeptInputs(key, names, how))
    for result, got in second.items():
        if result not in first or not _same(got, first[result]) or not _moves(examination, ref, result):
            continue
        where = "in the same memory" if how == SAME_MEMORY else "in a tensor of the same id"
        sentence = f"with other numbers in {' and '.join(names)} {where}, {result} stays as before, bit for bit"
        if _right(examination, result, first[result]):
            return sentence
        fresh = _forward(examination, moved, None).get(result)
        if fresh is not None and not _same(got, fresh):
            return f"{sentence}, and with them in a tensor of its own it does not"
    return None


def _forward(examination: Examination, material: Material, kept: KeptInputs | None) -> dict[str, Tensor]:
    """The forward's result for inputs that an earlier run left in memory, or placed anew, between guard bands."""
    how = RunSettings(fill=ZERO_FILL, fresh=False, backward=False, kept_inputs=kept)
    run = examination.execute(PROBE, PROBE, how, material, look=False)
    return {n: t for n, t in run.outputs.items() if run.error is None}


def _moves(examination: Examination, ref: GoldenResults, name: str) -> bool:
    now, before = ref.bounded.get(name), examination.ref.bounded.get(name)
    if now is None or before is None or now.value.shape != before.value.shape:
        return False
    step = (now.value.double() - before.value.double()).abs()
    return bool((step > 4 * SLACK * (now.bound + before.bound)).any())


def _right(examination: Examination, name: str, got: Tensor) -> bool:
    bounded = examination.ref.bounded[name]
    error = (got.double() - bounded.value.double()).abs()
    return got.shape == bounded.value.shape and bool((error <= SLACK * bounded.bound).all())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


def _with_references(examination: Examination, material: Material) -> tuple[dict[str, Tensor], GoldenResults] | None:
    run = examination.execute(PROBE, "small", RunSettings(), material, look=False)
    if run.error is not None:
        return None
    try:
        ref = examination.references(material, run, own_decisions(examination, run))
        _ = ref.bounded
    except GoldenError:
        return None
    return {n: t for n, _, t in run.results() if t is not None}, ref


def _shares(
    before: tuple[dict[str, Tensor], GoldenResults], after: tuple[dict[str, Tensor], GoldenResults]
) -> Iterator[float]:
    for name, got in after[0].items():
        old, now, then = before[0].get(name), after[1].bounded.get(name), before[1].bounded.get(name)
        if old is None or now is None or then is None or not old.shape == got.shape == now.value.shape:
            continue
        step = (now.value.double() - then.value.double()).abs()
        moves = step > SLACK * (now.bound + then.bound)
        if bool(moves.any()):
            yield float((got == old)[moves].double().mean())
