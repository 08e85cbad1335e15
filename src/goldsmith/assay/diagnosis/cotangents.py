"""Which output's gradient carries the fault of a gradient, and which part of it: for backwards that name no stages.

One output gradient at a time, the others zero; then one slice of it at a time; then a single 1. The golden is asked
with the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..execute.run import CandidateRun, RunSettings
from ..golden.golden_error import GoldenError
from ..judge import ladder
from ..judge.examination import Examination
from ..probes import decisions
from .evidence import Carried
from .isolate import named

PROBE = "cotangents"
_SLICES = 10  # runs for each axis, at most
_RUNS = 40  # in all


def carried(
    examination: Examination, own: CandidateRun, name: str, *, spent: Callable[[], bool] = lambda: False
) -> Carried | None:
    """What `name`, a gradient or a backward stage of the candidate's, is wrong with; None for anything else."""
    sent = own.cotangents
    if not sent or not name.endswith(".grad") or name not in named(own):
        return None
    ask = _Asking(examination, own, name, spent)
    if not ask.wrong(sent):  # right in its numbers: what is wrong with it is done to memory
        return None
    always = ask.wrong({})
    alone = tuple(n for n, t in sent.items() if ask.wrong({n: t}))
    quiet = tuple(n for n in sent if n not in alone)
    results = {n for n, _, _ in own.results()}
    opaque = not any(n.endswith(".grad") and n not in results for n in own.stages)
    if always or not alone or not opaque:
        return Carried(name, alone, quiet, always)
    first = alone[0]
    parts: dict[int, tuple[tuple[int, int], ...]] = {}
    at, together = [], []
    for axis, size in enumerate(sent[first].shape):
        spans = ask.spans(first, axis) if size > 1 else ((0, 0),)
        if not spans and not ask.ended:
            together.append(axis)
        at.append(spans[0][0] if spans else 0)
        if spans and spans != ((0, size - 1),):
            parts[axis] = spans
    unit = torch.zeros_like(sent[first])
    unit[tuple(at)] = 1
    single = tuple(at) if not together and ask.wrong({first: unit}) else None
    return Carried(name, alone, quiet, always, parts, single, tuple(together))


class _Asking:
    def __init__(self, examination: Examination, own: CandidateRun, name: str, spent: Callable[[], bool]):
        self.examination, self.own, self.name, self.spent, self.left = examination, own, name, spent, _RUNS

    @property
    def ended(self) -> bool:
        return self.left <= 0 or self.spent()

    def wrong(self, sent: Mapping[str, Tensor]) -> bool:
        """Whether the tensor is wrong with these output gradients, and zeros for the others; no answer counts as no."""
        if self.ended:
            return False
        self.left -= 1
        every = {n: sent.get(n, torch.zeros_like(t)) for n, t in self.own.cotangents.items()}
        how = RunSettings(cotangents=every, debug=self.own is not self.examination.first)
        done = self.examination.execute(PROBE, "other output gradients", how, look=False)
        if done.error is not None:
            return False
        try:
            ref = decisions.settle(self.examination, done, self.examination.references(self.examination.material, done))
            against = ref.reference(self.name, "grad", noise=False)
        except GoldenError:
            return False
        got = named(done).get(self.name, ("", None))[1]
        if got is None or against is None:
            return False
        return not ladder.judge(self.name, got, against, probe=PROBE).ok

    def spans(self, output: str, axis: int) -> tuple[tuple[int, int], ...]:
        """The ranges of an axis whose slices, one at a time, make it wrong; edges are found by halving."""
        size = self.own.cotangents[output].shape[axis]
        most = min(_SLICES, self.left)
        known: dict[int, bool] = {}

        def state(i: int) -> bool:
            if i not in known and len(known) < most:
                part = torch.zeros_like(self.own.cotangents[output])
                part.narrow(axis, i, 1).copy_(self.own.cotangents[output].narrow(axis, i, 1))
                known[i] = self.wrong({output: part})
            return known.get(i, False)

        marks = sorted({0, size // 2, size - 1})
        for i in marks:
            state(i)
        for lo, hi in zip(marks, marks[1:], strict=False):
            while hi - lo > 1 and known.get(lo) != known.get(hi) and len(known) < most:
                middle = (lo + hi) // 2
                lo, hi = (middle, hi) if state(middle) == known[lo] else (lo, middle)
        found: list[tuple[int, int]] = []
        for i in range(size):
            if known[min((abs(k - i), k) for k in known)[1]]:
                joined = found and found[-1][1] == i - 1
                found[-1:] = [(found[-1][0], i)] if joined else [*found[-1:], (i, i)]
        return tuple(found)
