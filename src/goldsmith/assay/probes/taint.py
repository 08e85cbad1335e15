"""Which slices of an input have influence: first, last and a random one of every axis, candidate against golden.

Screen (taint_screen.py): few runs in which many slices are changed at once clear those whose influence shows in the
candidate as it does in the golden. What a screen cannot clear is run alone: NaN first, and where NaN stays silent or
leaks, a large finite number in the same slice decides, since NaN alone is blind behind a maximum or a mask, and the
finite one behind saturation: a slice counts as read when either shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..execute.run import RunSettings
from ..golden.golden_results import GoldenResults
from ..judge.examination import Examination
from ..report.results import CERTAIN
from . import reach, taint_screen
from .slices import NAME, Slice, nan_masks, ran, results, slices

LITTLE = (
    "by less than rounding of the numbers beside it: a floor under small numbers, or another formula, that adds up "
    "larger ones; where that is meant, write the golden by that formula"
)


def run(examination: Examination) -> None:
    todo = taint_screen.remaining(examination, slices(examination))
    for part in todo:
        (_finite if part.random else _nan)(examination, part)
    _beside(examination)


def _nan(examination: Examination, part: Slice) -> None:
    made = ran(examination, part.filled(examination, float("nan")), f"taint:nan({part.text})")
    suspects = [] if made is None else nan_masks(examination, *made)
    if made is not None and suspects:
        _second_opinion(examination, part, suspects, made[1])


def _second_opinion(
    examination: Examination, part: Slice, suspects: list[tuple[str, Tensor, Tensor]], with_nan: GoldenResults
) -> None:
    """The large finite number in the same slice decides."""
    made = ran(examination, part.filled(examination, None), f"taint:finite({part.text})")
    if made is None:
        return
    done, references = made
    first = {n: t for n, _, t in examination.first.results()}
    leaks: dict[str, Tensor] = {}
    for name, silent, leaking in suspects:
        tensor = results(examination, done).get(name)
        if tensor is None or name not in references.values:
            continue
        still = tensor == first[name]
        _missing(examination, part, name, silent & still, tensor, references)
        leaking &= references.values[name] == examination.ref.values[name]
        if bool(leaking.any()):  # a convolution of torch's multiplies what it pads with, NaN too
            leaks[name] = leaking & ~with_nan.in_its_own_run(name, torch.isnan)
    leaks = {n: mask for n, mask in leaks.items() if bool(mask.any())}
    said = f"taint:finite({part.text})"
    reached = (
        reach.seen(examination, leaks, lambda times: part.filled(examination, None, times=times), said) if leaks else {}
    )
    for name, mask in leaks.items():
        if bool(reached[name].any()):
            _extra(examination, part, name, mask, "NaN", references)
        else:  # 0 * NaN, NaN - NaN
            said = f"NaN in {part.text} spreads farther in {name} than in the golden; numbers do not"
            examination.note("nan_spread", name, said)


def _finite(examination: Examination, part: Slice) -> None:
    made = ran(examination, part.filled(examination, None), f"taint:finite({part.text})")
    if made is None:
        return
    done, references = made
    first = {n: t for n, _, t in examination.first.results()}
    for name, tensor in results(examination, done).items():
        expected, before, was = references.values.get(name), examination.ref.bounded.get(name), first.get(name)
        if expected is None or before is None or was is None or expected.shape != tensor.shape:
            continue
        change = (expected - before.value).abs()
        still = tensor == was
        _missing(examination, part, name, still & (change > 0), tensor, references)
        stepped = (change == 0) & ~still & ~((tensor.double() - was.double()).abs() <= 2 * SLACK * before.bound)
        if bool(stepped.any()):
            said = f"taint:finite({part.text})"
            found = reach.seen(
                examination, {name: stepped}, lambda times: part.filled(examination, None, times=times), said
            )
            _extra(examination, part, name, found[name], "a large number", references)


def _beside(examination: Examination) -> None:
    """Large numbers of both signs beside the inputs in memory, where NaN lay before: a comparison swallows NaN."""
    first = {n: t for n, _, t in examination.first.results()}
    told: set[str] = set()
    for sign in (1, -1):  # what is read alone has one of them
        done = examination.execute(NAME, f"taint:beside({sign:+d})", RunSettings(neighbour_sign=sign), look=False)
        if done.error is not None or not examination.same_decisions(done):
            return
        for name, tensor in results(examination, done).items():
            before, was = examination.ref.bounded.get(name), first.get(name)
            if name in told or before is None or was is None or was.shape != tensor.shape:
                continue
            still = (tensor == was) | (torch.isnan(tensor) & torch.isnan(was))
            still |= (tensor.double() - was.double()).abs() <= 2 * SLACK * before.bound
            if not bool(still.all()):
                where = examination.locate(name, ~still)
                text = f"what lies beside the inputs in memory reaches {name} ({where.text}): a stray read"
                examination.find(CERTAIN, NAME, name, text, where=where)
                told.add(name)


def _missing(
    examination: Examination, part: Slice, name: str, mask: Tensor, tensor: Tensor, references: GoldenResults
) -> None:
    """The same value as before, although the golden's has gone farther than rounding explains."""
    if not bool(mask.any()):
        return
    now, before = references.bounded[name], examination.ref.bounded[name]
    proven = (tensor.double() - now.value).abs() > SLACK * now.bound
    unproven = now.open | before.open
    if bool((mask & unproven).any()):
        farthest = _spread(references, name) + _spread(examination.ref, name)
        proven |= unproven & ((now.value - before.value).abs() > farthest)
    mask = mask & proven
    mask = reach.off_kinks(examination, name, mask, references)
    if bool(mask.any()):
        where = examination.locate(name, mask)
        text = f"{part.text} has no influence on {name} ({where.text}), in the golden it has: "
        small = (now.value - before.value).abs() <= reach.formula(examination, name)
        text += LITTLE if bool(small[mask].all()) else "a reduction cut short, or a wrong mask"
        examination.find(CERTAIN, NAME, name, text, where=where, measured=0.0)


def _spread(references: GoldenResults, name: str) -> Tensor:
    """Where bounds are open: sixteen times the farthest of eight legal runs, and the store's rounding."""
    golden = references.bounded[name].value
    out = torch.zeros_like(golden)
    for member in references.ensemble:
        out = torch.maximum(out, torch.nan_to_num((member[name].double() - golden).abs(), torch.inf))
    store = references.stores.get(name, references.compute)
    rounding = torch.finfo(store).eps if store.is_floating_point else 0.0
    return 16 * (out + rounding * golden.abs() + torch.finfo(torch.float32).tiny)


def _extra(
    examination: Examination, part: Slice, name: str, mask: Tensor, what: str, references: GoldenResults
) -> None:
    mask = reach.off_kinks(examination, name, mask, references)
    if bool(mask.any()):
        where = examination.locate(name, mask)
        text = f"{what} in {part.text} reaches {name} ({where.text}), in the golden it does not: "
        text += "a wrong mask, or a stray read"
        examination.find(CERTAIN, NAME, name, text, where=where)
