"""Clears slices in few runs: changes many at once, and runs the golden without each change to separate them.

Influence. All slices of one axis of every input are replaced by finite numbers at once. Let g be the golden's result
there, and g_s its result with slice s unchanged. The candidate's y follows s where |y - g| <= |g - g_s| / 4; a kernel
that does not read s gives g_s. A slice is cleared if y follows at every element where g and g_s differ by more than
rounding, and these are at least half of the elements that NaN in s reaches.

Leaks. NaN in s must reach no element that it does not reach in the golden. Neither must a large finite number, which
passes a maximum that swallows NaN. Slices with the same footprint in the golden share a run, in which the random slices
of their axes hold the finite number. Slices that reach every element cannot leak.

Slices that are not cleared (saturated, masked, or wrong) get a run of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..execute.records import CandidateRun, Material
from ..golden.golden_results import GoldenResults
from ..judge import ladder
from ..judge.examination import Examination
from .slices import Slice, nan_masks, results, run_changed, spread

Footprint = dict[str, Tensor]


def remaining(examination: Examination, slices: list[Slice]) -> list[Slice]:
    """The slices that need a run of their own, in their order."""
    if examination.target.decisions or not slices:
        return slices  # a changed input changes decisions, and through them the reach of slices
    footprints = {s: _footprint(examination, s) for s in slices}
    left: set[Slice] = set()
    for axis in sorted({s.axis for s in slices}):
        left |= _without_influence(examination, [s for s in slices if s.axis == axis], footprints)
    left |= {s for s in slices if s.binary}  # these inputs cannot hold NaN
    left |= _leaking(examination, [s for s in slices if s not in left], footprints)
    return [s for s in slices if s in left]


def _golden(examination: Examination, material: Material) -> GoldenResults:
    """The golden on other inputs, in the dtypes of the first run."""
    return examination.references(material, examination.first)


def _footprint(examination: Examination, part: Slice) -> Footprint:
    values = _golden(examination, part.filled(examination, float("nan"))).values
    return {n: torch.isnan(values[n]) for n in results(examination, examination.first) if n in values}


# influence


def _without_influence(examination: Examination, slices: list[Slice], footprints: dict[Slice, Footprint]) -> set[Slice]:
    """The slices of one axis whose influence does not show when all of them are changed."""
    outcome = run_changed(examination, _changed(examination, slices), f"taint:axis {slices[0].axis}")
    if outcome is None:
        return set(slices)
    run, references = outcome
    _ = references.bounded  # also computes the values; needed below if all slices show
    left = set()
    for part in slices:
        others = [s for s in slices if (s.name, s.index) != (part.name, part.index)]
        unchanged = _golden(examination, _changed(examination, others)).values
        if not _follows(examination, results(examination, run), references, unchanged, footprints[part]):
            left.add(part)
    if not left and not all(_right(name, y, references) for name, y in results(examination, run).items()):
        return set(slices)  # all slices show, yet the values are wrong: something shows where it should not
    return left


def _right(name: str, y: Tensor, references: GoldenResults) -> bool:
    against = references.reference(name, "output", noise=False)
    return against is None or ladder.judge(name, y, against).ok


def _changed(examination: Examination, slices: list[Slice]) -> Material:
    """The inputs with these slices at about 2 rms (8 in 16 bits), each independent of the others."""
    changed: dict[str, Tensor] = {}
    rms: dict[str, float] = {}
    for part in slices:
        tensor = examination.material.inputs[part.name]
        if part.name not in changed:
            changed[part.name] = tensor.clone(memory_format=torch.contiguous_format)
            rms[part.name] = float(tensor.double().square().mean().sqrt())
        place = part.of(changed[part.name])
        if part.binary:
            place.copy_(1 - part.of(tensor))
            continue
        generator = torch.Generator().manual_seed(examination.seed + 31 * part.index + part.axis)
        # large enough to show above the store's rounding, and too small to saturate
        size = (8 if tensor.dtype.itemsize == 2 else 2) * (rms[part.name] if rms[part.name] > 0 else 1.0)
        place.copy_(spread(place, generator) * min(4 / 3 * size, torch.finfo(tensor.dtype).max / 8))
    return examination.material.with_inputs(changed)


def _follows(
    examination: Examination,
    actual: dict[str, Tensor],
    references: GoldenResults,
    unchanged: dict[str, Tensor],
    footprints: Footprint,
) -> bool:
    """Whether every result responds to a slice as the golden does. unchanged: the golden with the slice unchanged."""
    for name, mask in footprints.items():
        y, g = actual.get(name), references.values.get(name)
        if y is None or g is None or y.shape != g.shape:
            return False
        if not g.numel():
            continue
        response = (g - unchanged[name]).abs()
        store, compute = references.stores.get(name, references.compute), references.compute
        rounding = 16 * torch.finfo(store).eps * g.abs() + 256 * torch.finfo(compute).eps * g.abs().amax()
        clear = response > rounding
        follows = (y.double() - g).abs() <= response / 4
        astray = (clear & ~follows).any() | (2 * (clear & mask).sum() < mask.sum())
        if bool(astray):
            return False
    return True


# leaks


def _leaking(examination: Examination, slices: list[Slice], footprints: dict[Slice, Footprint]) -> set[Slice]:
    """The slices whose NaN, or whose finite number, shows at other elements than in the golden."""
    left: set[Slice] = set()
    for group in _by_footprint([s for s in slices if not s.random], footprints):
        axes = {(s.name, s.axis) for s in group}
        covered = {(s.name, s.axis, s.index) for s in group}
        finite = [
            s for s in slices if s.random and (s.name, s.axis) in axes and (s.name, s.axis, s.index) not in covered
        ]
        material = examination.material
        for parts, value in ((finite, None), (group, float("nan"))):
            for part in parts:
                material = part.filled(examination, value, material)
        label = f"taint:nan({', '.join(s.text for s in group)})"
        outcome = run_changed(examination, material, label)
        if outcome is None or nan_masks(examination, *outcome) or _moved(examination, *outcome):
            left |= {*group, *finite}
    return left


def _by_footprint(slices: list[Slice], footprints: dict[Slice, Footprint]) -> list[list[Slice]]:
    """Groups of slices with the same footprint, without slices that reach every element."""
    groups: dict[tuple, list[Slice]] = {}
    for part in slices:
        if not all(bool(mask.all()) for mask in footprints[part].values()):
            key = tuple((n, m.cpu().numpy().tobytes()) for n, m in footprints[part].items())
            groups.setdefault(key, []).append(part)
    return list(groups.values())


def _moved(examination: Examination, run: CandidateRun, references: GoldenResults) -> bool:
    """Whether a result moved by more than rounding at an element where the golden's did not move."""
    first = {n: t for n, _, t in examination.first.results()}
    for name, y in results(examination, run).items():
        expected, before, was = references.values.get(name), examination.ref.bounded.get(name), first.get(name)
        if expected is not None and before is not None and was is not None and expected.shape == y.shape:
            still = (y == was) | ((y.double() - was.double()).abs() <= 2 * SLACK * before.bound)
            if bool((~still & (expected == before.value)).any()):
                return True
    return False
