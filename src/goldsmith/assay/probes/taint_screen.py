"""Clears slices in few runs: what is changed together is told apart by the golden, which is run without each of them.

Influence. All slices of one axis of every input are replaced at once by finite numbers. With g the golden's result
there and g_s its result with slice s left as it was, the candidate's y follows s where |y - g| <= |g - g_s| / 4: a
kernel that does not read s gives g_s. A slice is cleared when y follows at every element where g and g_s differ by
more than rounding, and these are at least half of those that NaN in s reaches.

Leaks. NaN in s must not reach what it does not reach in the golden; nor must a large finite number, which passes a
maximum that swallows NaN. Slices with the same footprint in the golden share a run, and the random slice of their axes
holds the finite number in it; slices that reach everything have nowhere to leak to.

What is not cleared (saturated, masked, or wrong) is left for a run of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..execute.run import CandidateRun, Material
from ..golden.golden_results import GoldenResults
from ..golden.kinks import binary
from ..judge import ladder
from ..judge.examination import Examination
from .slices import Slice, nan_masks, ran, results, spread

Footprint = dict[str, Tensor]


def remaining(examination: Examination, slices: list[Slice]) -> list[Slice]:
    """The slices that need a run of their own, in their order."""
    if examination.target.decisions or not slices:
        return slices  # a changed input changes decisions, and with them what reaches what
    reach = {s: _footprint(examination, s) for s in slices}
    left: set[Slice] = set()
    for axis in sorted({s.axis for s in slices}):
        left |= _without_influence(examination, [s for s in slices if s.axis == axis], reach)
    left |= {s for s in slices if binary(examination.material.inputs[s.name])}  # NaN is none of their values
    left |= _leaking(examination, [s for s in slices if s not in left], reach)
    return [s for s in slices if s in left]


def _golden(examination: Examination, material: Material) -> GoldenResults:
    """The golden on other inputs, in the dtypes of the first run."""
    return examination.references(material, examination.first)


def _footprint(examination: Examination, part: Slice) -> Footprint:
    found = _golden(examination, part.filled(examination, float("nan"))).values
    return {n: torch.isnan(found[n]) for n in results(examination, examination.first) if n in found}


# influence


def _without_influence(examination: Examination, slices: list[Slice], reach: dict[Slice, Footprint]) -> set[Slice]:
    """Those of one axis' slices whose influence does not show when all of them are changed."""
    made = ran(examination, _changed(examination, slices), f"taint:axis {slices[0].axis}")
    if made is None:
        return set(slices)
    done, references = made
    _ = references.bounded  # which has the values with it, and is asked for where all of them show
    left = set()
    for part in slices:
        others = [s for s in slices if (s.name, s.index) != (part.name, part.index)]
        kept = _golden(examination, _changed(examination, others)).values
        if not _follows(examination, results(examination, done), references, kept, reach[part]):
            left.add(part)
    if not left and not all(_right(name, y, references) for name, y in results(examination, done).items()):
        return set(slices)  # all of them show, and the values are wrong: something shows where it should not
    return left


def _right(name: str, y: Tensor, references: GoldenResults) -> bool:
    against = references.reference(name, "output", noise=False)
    return against is None or ladder.judge(name, y, against).ok


def _changed(examination: Examination, slices: list[Slice]) -> Material:
    """The inputs with these slices at about 2 rms (8 in 16 bits); each has its numbers whatever the others are."""
    changed: dict[str, Tensor] = {}
    for part in slices:
        tensor = examination.material.inputs[part.name]
        if part.name not in changed:
            changed[part.name] = tensor.clone(memory_format=torch.contiguous_format)
        place = part.of(changed[part.name])
        if binary(tensor):
            place.copy_(1 - part.of(tensor))
            continue
        generator = torch.Generator().manual_seed(examination.seed + 31 * part.index + part.axis)
        rms = float(tensor.double().square().mean().sqrt())
        # enough to show above the rounding of a store, and short of saturating what is not saturated
        size = (8 if tensor.dtype.itemsize == 2 else 2) * (rms if rms > 0 else 1.0)
        place.copy_(spread(place, generator) * min(4 / 3 * size, torch.finfo(tensor.dtype).max / 8))
    return examination.material.with_inputs(changed)


def _follows(
    examination: Examination,
    got: dict[str, Tensor],
    references: GoldenResults,
    kept: dict[str, Tensor],
    reach: Footprint,
) -> bool:
    """Whether every result answers to a slice as the golden does; kept: the golden with the slice as it was."""
    for name, mask in reach.items():
        y, g = got.get(name), references.values.get(name)
        if y is None or g is None or y.shape != g.shape:
            return False
        if not g.numel():
            continue
        response = (g - kept[name]).abs()
        store, compute = references.stores.get(name, references.compute), references.compute
        rounding = 16 * torch.finfo(store).eps * g.abs() + 256 * torch.finfo(compute).eps * g.abs().amax()
        clear = response > rounding
        follows = (y.double() - g).abs() <= response / 4
        if not bool(follows[clear].all()) or 2 * int((clear & mask).sum()) < int(mask.sum()):
            return False
    return True


# leaks


def _leaking(examination: Examination, slices: list[Slice], reach: dict[Slice, Footprint]) -> set[Slice]:
    """Those whose NaN, or whose finite number, shows in other places than in the golden."""
    left: set[Slice] = set()
    for group in _alike([s for s in slices if not s.random], reach):
        axes = {(s.name, s.axis) for s in group}
        taken_by = {(s.name, s.axis, s.index) for s in group}
        finite = [
            s for s in slices if s.random and (s.name, s.axis) in axes and (s.name, s.axis, s.index) not in taken_by
        ]
        material = examination.material
        for parts, value in ((finite, None), (group, float("nan"))):
            for part in parts:
                material = part.filled(examination, value, material)
        label = f"taint:nan({', '.join(s.text for s in group)})"
        made = ran(examination, material, label)
        if made is None or nan_masks(examination, *made) or _moved(examination, *made):
            left |= {*group, *finite}
    return left


def _alike(slices: list[Slice], reach: dict[Slice, Footprint]) -> list[list[Slice]]:
    """The slices with something beyond their footprint, those of equal footprint together."""
    groups: dict[tuple, list[Slice]] = {}
    for part in slices:
        if not all(bool(mask.all()) for mask in reach[part].values()):
            key = tuple((n, m.cpu().numpy().tobytes()) for n, m in reach[part].items())
            groups.setdefault(key, []).append(part)
    return list(groups.values())


def _moved(examination: Examination, done: CandidateRun, references: GoldenResults) -> bool:
    """Whether something has changed by more than rounding that stays as it was in the golden."""
    first = {n: t for n, _, t in examination.first.results()}
    for name, y in results(examination, done).items():
        expected, before, was = references.values.get(name), examination.ref.bounded.get(name), first.get(name)
        if expected is not None and before is not None and was is not None and expected.shape == y.shape:
            still = (y == was) | ((y.double() - was.double()).abs() <= 2 * SLACK * before.bound)
            if bool((~still & (expected == before.value)).any()):
                return True
    return False
