"""Which slices of an input the candidate depends on, against the golden: where influence is missing, where it leaks.

A slice is changed to a large finite number in candidate and golden; it has influence on a result where that moves.
Groups of slices are halved: a group whose influence agrees everywhere it reaches needs no further run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..golden.golden_error import GoldenError
from ..golden.golden_results import GoldenResults
from ..judge.examination import Examination
from ..probes.reach import rounding
from ..probes.slices import far, own_decisions
from .evidence import Influence
from .isolate import named

PROBE = "influence"
SAME, EXTRA, ELSEWHERE, MISSING = _STATES = ("same", "extra", "elsewhere", "missing")
_BORDERS = 4
_RUNS = 24  # per axis: two edges of 2^9 slices and some more


def influence(
    examination: Examination,
    wrong: set[str],
    *,
    only: tuple[str, ...] | None = None,
    spent: Callable[[], bool] = lambda: False,
    runs: int = _RUNS,
    right: list[tuple[str, int, int]] | None = None,
) -> dict[str, Influence]:
    """By "input[axis]": the index ranges that have no influence and should, or have one and should not.

    only: look at these "input[axis]" alone
    wrong: the results and stages to look at, best the first wrong one alone: what follows is moved through it.
    right: takes (input, axis, length) of those that the results should move with, and do throughout, each slice
    everything that it should.
    Each axis costs one run where all is as it should be, `runs` at most elsewhere.
    """
    out = {}
    for name, tensor in examination.material.inputs.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        for axis in range(tensor.dim()):
            if tensor.shape[axis] < 2 or spent() or (only is not None and f"{name}[{axis}]" not in only):
                continue
            looked = _AxisInfluence(examination, name, axis, wrong, spent, runs)
            found = looked.find()
            if found is not None:
                out[f"{name}[{axis}]"] = found
            elif right is not None and looked.related and not looked.partly and not looked.spent():
                right.append((name, axis, looked.length))
    return out


class _AxisInfluence:
    """One axis of one input, searched by halving."""

    def __init__(
        self, examination: Examination, name: str, axis: int, wrong: set[str], spent: Callable[[], bool], runs: int
    ):
        self.examination, self.name, self.axis, self.wrong = examination, name, axis, wrong
        self.spent, self.left = spent, runs
        self.length = examination.material.inputs[name].shape[axis]
        self.first = {n: t for n, (_, t) in named(examination.first).items() if t is not None}
        self.outputs: set[str] = set()
        self.missing: list[tuple[int, int]] = []
        self.extra: list[tuple[int, int]] = []
        self.elsewhere: list[tuple[int, int]] = []
        self.related = False  # whether the golden's results move with any slice
        self.kept = False  # whether the candidate's move with any of those
        self.touched: dict[str, Tensor] = {}  # what moves with slices that are not as they should be
        self.at: int | None = None  # the slice that is looked at
        self.partly = False  # whether some of what a slice moves in the golden stays as it is
        self.steps: set[int] | None = (
            set()
        )  # how far a slice leaks from the one row of the result that it is of; None: of more
        self.rows = 0

    def find(self) -> Influence | None:
        ends = [(0, 0), (self.length - 1, self.length - 1)]
        states = [self.state(*e) for e in ends]
        middle = (1, self.length - 2)
        self._note(ends[0], states[0])
        if middle[0] <= middle[1]:
            self._halve(*middle, states[0], states[1])
        self._note(ends[1], states[1])
        self._beside_borders()
        if self.spent():  # what is not known counted as right: the ranges say nothing
            return None
        if not self.missing and not self.extra:
            return None
        if self.missing and not self.extra and not self.kept:
            return Influence(self.name, self.axis, (), (), tuple(sorted(self.outputs)), length=self.length, none=True)
        return Influence(
            self.name, self.axis, _joined(self.missing), _joined(self.extra), tuple(sorted(self.outputs)),
            elsewhere=_joined(self.elsewhere), length=self.length, foreign=not self.related, reached=self._reached(),
            onto=_onto(self.steps or set(), self.rows),
        )  # fmt: skip

    def _reached(self) -> float:
        """The share of the wrong elements of what is looked at that moves with those slices."""
        count = moved = 0
        for name, where in self.touched.items():
            bounded, mine = self.examination.ref.bounded[name], self.first[name]
            wrong = ~((mine.double() - bounded.value).abs() <= SLACK * bounded.bound) & (mine != bounded.value)
            count, moved = count + int(wrong.sum()), moved + int((wrong & where).sum())
        return moved / count if count else 1.0

    def _beside_borders(self) -> None:
        """What lies on both sides of where a group begins, as far as an input says so: halving steps over it."""
        for border in _borders(self.examination, self.length):
            for place, step in ((border, 1), (border - 1, -1)):
                while 0 <= place < self.length and not self._known(place):
                    state = self.state(place, place)
                    if state not in (EXTRA, ELSEWHERE):  # what every group lacks is told by its first and last one
                        break
                    self._note((place, place), state)
                    place += step

    def _known(self, place: int) -> bool:
        return any(lo <= place <= hi for lo, hi in (*self.missing, *self.extra))

    def _halve(self, lo: int, hi: int, before: str, after: str) -> None:
        """Between two known ends: where both agree a slice in the middle speaks for all, else the edge is searched."""
        if lo > hi:
            return
        middle = (lo + hi) // 2
        state = self.state(middle, middle)
        if before == state == after:
            self._note((lo, hi), state)
            return
        if state == before:
            self._note((lo, middle), state)
        else:
            self._halve(lo, middle - 1, before, state)
            self._note((middle, middle), state)
        if state == after:
            self._note((middle + 1, hi), state)
        else:
            self._halve(middle + 1, hi, state, after)

    def _note(self, span: tuple[int, int], state: str) -> None:
        if span[0] <= span[1] and state != SAME:
            (self.missing if state == MISSING else self.extra).append(span)
        if span[0] <= span[1] and state == ELSEWHERE:
            self.elsewhere.append(span)

    def state(self, lo: int, hi: int) -> str:
        """Unknown counts as the same. Of several results the one that says most counts."""
        if self.left <= 0 or self.spent():
            return SAME
        self.left -= 1
        self.at = lo if lo == hi else None
        examination = self.examination
        copy = examination.material.inputs[self.name].clone(memory_format=torch.contiguous_format)
        part = copy.narrow(self.axis, lo, hi - lo + 1)
        signs = torch.randint(0, 2, part.shape, generator=torch.Generator().manual_seed(lo)) * 2 - 1
        part.copy_(signs.to(part.device, part.dtype) * far(examination.material.inputs[self.name]))
        material = examination.material.with_inputs({self.name: copy})
        done = examination.execute(PROBE, f"influence of {self.name}", material=material, look=False)
        if done.error is not None:
            return SAME
        ref = examination.references(material, done, own_decisions(examination, done))
        said = SAME
        try:
            now = ref.plain
            for name, (_, tensor) in named(done).items():
                if name not in self.wrong or tensor is None or name in examination.target.decisions:
                    continue
                if not self._may_move(name, tensor, now):
                    continue
                found, where = self._moved(name, tensor, ref)
                if found != SAME:
                    self.outputs.add(name)
                    self.touched[name] = self.touched.get(name, torch.zeros_like(where)) | where
                said = max(said, found, key=_STATES.index)
        except GoldenError:
            return SAME
        return said

    def _may_move(self, name: str, tensor: Tensor, now: dict[str, Tensor]) -> bool:
        """Whether `_moved` can find anything: mostly the golden's numbers, without their bounds, say no already."""
        after, before, mine = now.get(name), self.examination.ref.plain.get(name), self.first.get(name)
        bounded = self.examination.ref.bounded.get(name)
        if after is None or before is None or mine is None or bounded is None or after.shape != tensor.shape:
            return False
        goes = after != before
        self.related |= bool(goes.any())
        still = tensor == mine
        self.kept |= bool((goes & ~still).any())
        if bool((goes & still).any()):
            return True
        step = (tensor.double() - mine.double()).abs()
        return bool((~goes & (step > 4 * SLACK * bounded.bound) & torch.isfinite(step)).any())

    def _moved(self, name: str, tensor: Tensor, ref: GoldenResults) -> tuple[str, Tensor]:
        """MISSING: it moves in the golden, and nowhere in the candidate. EXTRA: some element moves in the candidate
        alone. ELSEWHERE: so it does, and some of those that the golden moves stay.

        The golden counts as moved where it goes farther than rounding; the candidate as still where no bit changes.
        With it comes where that moves which says so: the golden where something is missing, else the candidate.
        """
        now, before, mine = ref.bounded.get(name), self.examination.ref.bounded.get(name), self.first.get(name)
        if now is None or before is None or mine is None or now.value.shape != tensor.shape:
            return SAME, torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        change = (now.value - before.value).abs()
        nans = torch.isnan(tensor) & torch.isnan(mine)
        still = (tensor == mine) & ~nans
        moves = change > SLACK * (now.bound + before.bound)
        step = (tensor.double() - mine.double()).abs()
        leaks = (change == 0) & (step > 4 * SLACK * (now.bound + before.bound)) & torch.isfinite(step)
        # a transform over a whole axis moves every element by the rounding of the largest; whole numbers have none
        if bool(leaks.any()) and tensor.is_floating_point():
            leaks &= ~(step <= rounding(self.examination, name, ref))
        self._leaked(moves, leaks)
        self.partly |= bool(still[moves].any())
        if not bool(leaks.any()):
            return MISSING if bool(moves.any()) and bool(still[moves].all()) else SAME, moves
        return ELSEWHERE if bool(still[moves].any()) else EXTRA, ~still

    def _leaked(self, moves: Tensor, leaks: Tensor) -> None:
        """How far from a slice's own row of the result it leaks, where the golden has it in that row alone."""
        if self.at is None or self.steps is None or not bool(leaks.any()):
            return
        for axis, rows in enumerate(moves.shape):
            own, others = (_places(t, axis) for t in (moves, leaks))
            if len(own) == 1 and others - own:
                self.steps |= {at - min(own) for at in others - own}
                self.rows = rows
                return
        self.steps = None


def _places(where: Tensor, axis: int) -> set[int]:
    return set(where.movedim(axis, 0).reshape(where.shape[axis], -1).any(1).nonzero().flatten().tolist())


def _onto(steps: set[int], length: int) -> str:
    """A name for the rows at these distances, of so many."""
    if not steps:
        return ""
    if min(steps) > 0:
        return "next" if steps == {1} and length > 2 else "later"
    if max(steps) < 0:
        return "last" if steps == {-1} and length > 2 else "earlier"
    return "other"


def _borders(examination: Examination, length: int) -> list[int]:
    """Where groups of slices of an axis begin, of offsets among the inputs that end where the axis ends."""
    found: list[int] = []
    for t in examination.material.inputs.values():
        offsets = not t.is_floating_point() and t.dtype != torch.bool and t.dim() == 1 and len(t) > 2
        if offsets and int(t[-1]) == length and bool((t.diff() >= 0).all()):
            found += [b for b in t.unique().tolist() if 0 < b < length]
    return found[:_BORDERS]


def _joined(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if out and lo == out[-1][1] + 1:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return tuple(out)
