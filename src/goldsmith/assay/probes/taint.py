"""Compares the influence of input slices in candidate and golden: the first, last and a random slice of every axis.

A slice without influence is silent for several numbers: after one, a rounded result may be the same by chance.
A screen (taint_screen.py) changes many slices in a few runs, and clears those with the same influence in both.
Each remaining slice gets its own run with NaN. If that NaN stays silent or leaks, a large finite number in the slice
decides: NaN alone shows nothing behind a maximum or mask, a finite number nothing behind saturation. A slice counts as
read if either shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..execute.records import RunSettings
from ..golden.golden_results import GoldenResults
from ..judge.examination import Examination
from ..report.results import CERTAIN
from . import reach, taint_screen
from .slices import NAME, Slice, nan_masks, results, run_changed, slices

LITTLE = (
    "its change is below the rounding of its neighbours: a floor under small numbers, or another formula that adds "
    "larger ones; if that is intended, write the golden by that formula"
)


def run(examination: Examination) -> None:
    todo = taint_screen.remaining(examination, slices(examination))
    for part in todo:
        (_try_finite if part.random else _try_nan)(examination, part)
    _try_neighbours(examination)


def _try_nan(examination: Examination, part: Slice) -> None:
    outcome = run_changed(examination, part.filled(examination, float("nan")), f"taint:nan({part.text})")
    suspects = [] if outcome is None else nan_masks(examination, *outcome)
    if outcome is not None and suspects:
        _second_opinion(examination, part, suspects, outcome[1])


def _second_opinion(
    examination: Examination, part: Slice, suspects: list[tuple[str, Tensor, Tensor]], with_nan: GoldenResults
) -> None:
    """Repeat with a large finite number in the same slice, which decides."""
    outcome = run_changed(examination, part.filled(examination, None), f"taint:finite({part.text})")
    if outcome is None:
        return
    run, references = outcome
    first = {n: t for n, _, t in examination.first.results()}
    leaks: dict[str, Tensor] = {}
    for name, silent, leaking in suspects:
        tensor = results(examination, run).get(name)
        if tensor is None or name not in references.values:
            continue
        still = tensor == first[name]
        _report_missing(examination, part, name, silent & still, tensor, references)
        leaking &= references.values[name] == examination.ref.values[name]
        if bool(leaking.any()):  # torch's convolution multiplies its padding, so NaN spreads there
            leaks[name] = leaking & ~reach.in_own_run(with_nan, name, torch.isnan)
    leaks = {n: mask for n, mask in leaks.items() if bool(mask.any())}
    label = f"taint:finite({part.text})"
    reached = (
        reach.reached_elements(examination, leaks, lambda times: part.filled(examination, None, times=times), label)
        if leaks
        else {}
    )
    for name, mask in leaks.items():
        if bool(reached[name].any()) or part.name in examination.target.holds_nan:
            _report_extra(examination, part, name, mask, "NaN", references)
        else:  # only NaN spreads: 0 * NaN, NaN - NaN
            message = f"NaN in {part.text} spreads to more of {name} than in the golden; finite numbers do not"
            examination.note("nan_spread", name, message)


def _try_finite(examination: Examination, part: Slice) -> None:
    outcome = run_changed(examination, part.filled(examination, None), f"taint:finite({part.text})")
    if outcome is None:
        return
    run, references = outcome
    first = {n: t for n, _, t in examination.first.results()}
    for name, tensor in results(examination, run).items():
        expected, before, was = references.values.get(name), examination.ref.bounded.get(name), first.get(name)
        if expected is None or before is None or was is None or expected.shape != tensor.shape:
            continue
        change = (expected - before.value).abs()
        still = tensor == was
        silent = still & (change > 0)
        if bool(silent.any()):
            _report_missing(
                examination, part, name, silent & _always_still(examination, part, name, was), tensor, references
            )
        stepped = (change == 0) & ~still & ~((tensor.double() - was.double()).abs() <= 2 * SLACK * before.bound)
        if bool(stepped.any()):
            label = f"taint:finite({part.text})"
            reached = reach.reached_elements(
                examination, {name: stepped}, lambda times: part.filled(examination, None, times=times), label
            )
            _report_extra(examination, part, name, reached[name], "a large number", references)


def _always_still(examination: Examination, part: Slice, name: str, was: Tensor) -> Tensor:
    """The elements of a result that other numbers in the slice do not change, either."""
    still = torch.ones_like(was, dtype=torch.bool)
    for times in (-1.0, 0.5):
        outcome = run_changed(
            examination, part.filled(examination, None, times=times), f"taint:finite({part.text}), {times:g}"
        )
        tensor = None if outcome is None else results(examination, outcome[0]).get(name)
        if tensor is not None and tensor.shape == was.shape:
            still &= tensor == was
    return still


def _try_neighbours(examination: Examination) -> None:
    """Run with large numbers next to the inputs in memory instead of NaN, because a comparison swallows NaN."""
    first = {n: t for n, _, t in examination.first.results()}
    reported: set[str] = set()
    for sign in (1, -1):  # a lone stray element has only one sign
        run = examination.execute(NAME, f"taint:beside({sign:+d})", RunSettings(neighbour_sign=sign), look=False)
        if run.error is not None or not examination.same_decisions(run):
            return
        for name, tensor in results(examination, run).items():
            before, was = examination.ref.bounded.get(name), first.get(name)
            if name in reported or before is None or was is None or was.shape != tensor.shape:
                continue
            still = (tensor == was) | (torch.isnan(tensor) & torch.isnan(was))
            still |= (tensor.double() - was.double()).abs() <= 2 * SLACK * before.bound
            if not bool(still.all()):
                where = examination.locate(name, ~still)
                text = f"memory next to the inputs reaches {name} ({where.text}): a stray read"
                examination.find(CERTAIN, NAME, name, text, where=where, kind="neighbour_read")
                reported.add(name)


def _report_missing(
    examination: Examination, part: Slice, name: str, mask: Tensor, tensor: Tensor, references: GoldenResults
) -> None:
    """Report elements that did not change, although the golden's moved farther than rounding explains."""
    if not bool(mask.any()):
        return
    now, before = references.bounded[name], examination.ref.bounded[name]
    off = (tensor.double() - now.value).abs()
    proven = (off > SLACK * now.bound) & (off > (tensor.double() - before.value).abs())
    unproven = now.open | before.open
    if bool((mask & unproven).any()):
        farthest = _open_noise(references, name) + _open_noise(examination.ref, name)
        proven |= unproven & ((now.value - before.value).abs() > farthest)
    mask = mask & proven
    mask = reach.off_kinks(examination, name, mask, references)
    if bool(mask.any()):
        where = examination.locate(name, mask)
        text = f"{part.text} has no influence on {name} ({where.text}), in the golden it has: "
        small = (now.value - before.value).abs() <= reach.formula_error(examination, name)
        little = bool(small[mask].all())
        text += LITTLE if little else "a reduction cut short, or a wrong mask"
        trick = "lowered_precision" if little else ""
        examination.find(CERTAIN, NAME, name, text, where=where, measured=0.0, trick=trick, kind="no_influence",
                         values=_of(part))  # fmt: skip


def _of(part: Slice) -> dict[str, object]:
    return {"input": part.name, "axis": part.axis, "index": part.index}


def _open_noise(references: GoldenResults, name: str) -> Tensor:
    """The noise where bounds are open: 16 times the farthest of eight legal runs, plus the store's rounding."""
    golden = references.bounded[name].value
    out = torch.zeros_like(golden)
    for member in references.ensemble:
        out = torch.maximum(out, torch.nan_to_num((member[name].double() - golden).abs(), torch.inf))
    store = references.stores.get(name, references.compute)
    rounding = torch.finfo(store).eps if store.is_floating_point else 0.0
    return 16 * (out + rounding * golden.abs() + torch.finfo(torch.float32).tiny)


def _report_extra(
    examination: Examination, part: Slice, name: str, mask: Tensor, change: str, references: GoldenResults
) -> None:
    mask = reach.off_kinks(examination, name, mask, references)
    if bool(mask.any()):
        where = examination.locate(name, mask)
        text = f"{change} in {part.text} reaches {name} ({where.text}), in the golden it does not: "
        text += "a wrong mask, or a stray read"
        examination.find(CERTAIN, NAME, name, text, where=where, kind="leak", values=_of(part))
