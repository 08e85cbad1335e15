"""Finds the output gradient, and the part of it, that makes a gradient wrong. For backwards without named stages.

Sends one output gradient at a time, with zeros for the others; then one slice of it at a time. The golden receives the
same gradients.
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
from ..facts.spans import of_indices
from .isolate import named

PROBE = "cotangents"
_SLICES = 16  # the longest axis whose slices are sent one by one
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
    for axis, size in enumerate(sent[first].shape):
        if 1 < size <= min(_SLICES, ask.left):
            bad = [i for i in range(size) if ask.wrong({first: _slice(sent[first], axis, i)})]
            parts |= {axis: tuple(of_indices(bad))} if len(bad) < size and not ask.ended else {}
    return GradientCarriers(name, alone, harmless, always, parts)


def _slice(sent: Tensor, axis: int, i: int) -> Tensor:
    """A gradient with zeros in all other slices."""
    part = torch.zeros_like(sent)
    part.narrow(axis, i, 1).copy_(sent.narrow(axis, i, 1))
    return part


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
