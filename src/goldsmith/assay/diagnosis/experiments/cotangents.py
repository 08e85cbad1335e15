"""Finds the output gradient, and the part of it, that makes a gradient wrong. For backwards without named stages.

Sends one output gradient at a time, with zeros for the others; then one slice of it at a time; then a single 1. The
golden receives the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...execute.records import CandidateRun, RunSettings
from ...golden.golden_error import GoldenError
from ...judge import ladder
from ...judge.examination import Examination
from ...probes import decisions
from ..facts.evidence import GradientCarriers
from .isolate import named

PROBE = "cotangents"
_SLICES = 16  # runs for each axis, at most
_RUNS = 64  # runs in all


def carriers(
    examination: Examination, own: CandidateRun, name: str, *, spent: Callable[[], bool] = lambda: False
) -> GradientCarriers | None:
    """The output gradients with which `name`, a gradient or backward stage, is wrong; None for any other tensor."""
    sent = own.cotangents
    if not sent or not name.endswith(".grad") or name not in named(own):
        return None
    ask = _Asking(examination, own, name, spent)
    if not ask.wrong(sent):  # its numbers are right, so its fault is in memory
        return None
    always = ask.wrong({})
    alone = tuple(n for n, t in sent.items() if ask.wrong({n: t}))
    harmless = tuple(n for n in sent if n not in alone)
    results = {n for n, _, _ in own.results()}
    opaque = not any(n.endswith(".grad") and n not in results for n in own.stages)
    if always or not alone or not opaque:
        return GradientCarriers(name, alone, harmless, always)
    first = alone[0]
    parts: dict[int, tuple[tuple[int, int], ...]] = {}
    sampled: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    at, together = [], []
    for axis, size in enumerate(sent[first].shape):
        known = ask.slices(first, axis) if size > 1 else {0: True}
        bad, good = (tuple(sorted(i for i, w in known.items() if w is wrong)) for wrong in (True, False))
        if len(known) < size:
            sampled[axis] = bad, good
        if known and not bad:
            together.append(axis)
        at.append(bad[0] if bad else 0)
        if bad and len(known) == size and good:
            parts[axis] = _ranges(bad)
    unit = torch.zeros_like(sent[first])
    unit[tuple(at)] = 1
    single = tuple(at) if not together and ask.wrong({first: unit}) else None
    return GradientCarriers(name, alone, harmless, always, parts, single, tuple(together), sampled)


class _Asking:
    def __init__(self, examination: Examination, own: CandidateRun, name: str, spent: Callable[[], bool]):
        self.examination, self.own, self.name, self.spent, self.left = examination, own, name, spent, _RUNS

    @property
    def ended(self) -> bool:
        return self.left <= 0 or self.spent()

    def wrong(self, sent: Mapping[str, Tensor]) -> bool:
        """True if the tensor is wrong with these output gradients, and zeros for the others; False without a result."""
        if self.ended:
            return False
        self.left -= 1
        every = {n: sent.get(n, torch.zeros_like(t)) for n, t in self.own.cotangents.items()}
        how = RunSettings(cotangents=every, debug=self.own is not self.examination.first)
        run = self.examination.execute(PROBE, "other output gradients", how, look=False)
        if run.error is not None:
            return False
        try:
            ref = decisions.settle(self.examination, run, self.examination.references(self.examination.material, run))
            against = ref.reference(self.name, "grad", noise=False)
        except GoldenError:
            return False
        got = named(run).get(self.name, ("", None))[1]
        if got is None or against is None:
            return False
        return not ladder.judge(self.name, got, against, probe=PROBE).ok

    def slices(self, output: str, axis: int) -> dict[int, bool]:
        """Slice of an axis -> whether it makes the tensor wrong, with zeros in all others; only slices that were tried.

        A short axis is tried slice by slice. A long one is bisected for the edges.
        """
        size = self.own.cotangents[output].shape[axis]
        most = min(_SLICES, self.left)
        known: dict[int, bool] = {}

        def state(i: int) -> bool | None:
            if i not in known and len(known) < most and not self.ended:
                part = torch.zeros_like(self.own.cotangents[output])
                part.narrow(axis, i, 1).copy_(self.own.cotangents[output].narrow(axis, i, 1))
                known[i] = self.wrong({output: part})
            return known.get(i)

        marks = list(range(size)) if size <= most else sorted({0, size // 2, size - 1})
        for i in marks:
            state(i)
        for lo, hi in zip(marks, marks[1:], strict=False):
            while hi - lo > 1 and known.get(lo) != known.get(hi) and len(known) < most and not self.ended:
                middle = (lo + hi) // 2
                lo, hi = (middle, hi) if state(middle) == known.get(lo) else (lo, middle)
        return known


def _ranges(indices: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ascending indices as inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for i in indices:
        joined = ranges and ranges[-1][1] == i - 1
        ranges[-1:] = [(ranges[-1][0], i)] if joined else [*ranges[-1:], (i, i)]
    return tuple(ranges)
