"""Other draws of the case, against which changes are checked.

If the wrong tensor has few elements, as a loss has, any factor explains the first draw. If it has many, an exact change
is still checked on one other draw: a shifted mask may hide the same elements of one draw as the mistake does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ...execute.records import CandidateRun, Material, RunSettings
from ...golden.golden_error import GoldenError
from ...judge.examination import Examination
from ...probes import decisions
from ..experiments.isolate import named
from ..graph.golden import Golden
from ..graph.recording import Listening
from .judge import Judge

FEW = 8  # wrong elements, at most, that a change can explain by chance
_PROBE = "whatif"
_DRAWS = 3
Operators = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Witness:
    """The candidate's results for other inputs, and the golden with those inputs.

    operators  of the golden in order, with shapes: a change refers to an operator by its index, and to places in it
    """

    golden: Golden
    leaves: Mapping[str, Tensor]
    judge: Judge

    @cached_property
    def operators(self) -> Operators:
        return operators(self.golden, self.leaves)


def operators(golden: Golden, leaves: Mapping[str, Tensor]) -> Operators:
    mode = Listening().record()
    golden.run_under(mode, leaves, "")
    shapes = (tuple(call.out.shape) if isinstance(call.out, Tensor) else () for call in mode.calls or ())
    return tuple(zip((call.name for call in mode.calls or ()), shapes, strict=True))


def few(judge: Judge) -> bool:
    return int(judge.wrong_at.sum()) <= FEW


def called(examination: Examination, tensor: str, own: CandidateRun, judge: Judge) -> list[Witness]:
    """The witnesses for changes that should explain `tensor`; one is enough if the first draw has many elements."""
    draws = range(1, _DRAWS + 1) if few(judge) else range(1, 2)
    return [w for w in (_witness(examination, tensor, own, salt) for salt in draws) if w is not None]


def _steered_alike(examination: Examination, other: Material) -> Material:
    """Witnesses with this draw's integers: a golden that loops over lengths and labels then calls the same operators.

    A change refers to an operator by its index among all; after another path, another operator has this index.
    """
    mine, theirs = examination.material.inputs, other.inputs
    whole = {n: t for n, t in mine.items() if not t.is_floating_point()}
    same = all(n in theirs and theirs[n].shape == t.shape for n, t in mine.items())
    return other.with_inputs(whole) if same and len(whole) < len(mine) else other


def _witness(examination: Examination, tensor: str, own: CandidateRun, salt: int) -> Witness | None:
    material = _steered_alike(examination, examination.variant(salt))
    how = RunSettings(debug=own is not examination.first)
    run = examination.execute(_PROBE, f"other inputs {salt}", how, material, look=False)
    got = None if run.error is not None else named(run).get(tensor, ("", None))[1]
    if got is None:
        return None
    try:
        ref = decisions.settle(examination, run, examination.references(material, run))
        bounded = ref.bounded.get(tensor)
    except GoldenError:
        return None
    if bounded is None or bounded.value.shape != got.shape:
        return None
    golden = Golden(ref, opened=not tensor.endswith(".grad"))
    return Witness(golden, ref.leaves, Judge(got.detach(), bounded.value, bounded.bound))
