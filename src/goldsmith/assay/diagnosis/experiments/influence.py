"""Compares on which slices of an input candidate and golden depend: finds missing and leaking influence.

Changes a slice to a large finite number in candidate and golden; the slice has influence on a result that moves.
Bisects groups of slices: a group whose influence agrees everywhere needs no further run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...bounds.bounded import SLACK
from ...golden.golden_error import GoldenError
from ...golden.golden_results import GoldenResults
from ...judge.examination import Examination
from ...probes.reach import rounding
from ...probes.slices import far, own_decisions
from ..facts.evidence import Influence
from ..facts.spans import joined
from .isolate import named

PROBE = "influence"
SAME, EXTRA, ELSEWHERE, MISSING = _STATES = ("same", "extra", "elsewhere", "missing")
_BORDERS = 4
_RUNS = 24  # per axis: enough for two edges among 2^9 slices


def influence(
    examination: Examination,
    wrong: set[str],
    *,
    only: tuple[str, ...] | None = None,
    spent: Callable[[], bool] = lambda: False,
) -> dict[str, Influence]:
    """By "input[axis]": the index ranges whose influence is missing, or that have influence and should not.

    only        examine only these "input[axis]"
    wrong       the results and stages to examine, ideally only the first wrong one, since later ones move through it
    An axis without differences costs one run, others at most 24.
    """
    out = {}
    for name, tensor in examination.material.inputs.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        for axis in range(tensor.dim()):
            if tensor.shape[axis] < 2 or spent() or (only is not None and f"{name}[{axis}]" not in only):
                continue
            ranges = _AxisInfluence(examination, name, axis, wrong, spent).find()
            if ranges is not None:
                out[f"{name}[{axis}]"] = ranges
    return out


class _AxisInfluence:
    """One axis of one input, searched by bisection."""

    def __init__(self, examination: Examination, name: str, axis: int, wrong: set[str], spent: Callable[[], bool]):
        self.examination, self.name, self.axis, self.wrong = examination, name, axis, wrong
        self.spent, self.left = spent, _RUNS
        self.length = examination.material.inputs[name].shape[axis]
        self.first = {n: t for n, (_, t) in named(examination.first).items() if t is not None}
        self.outputs: set[str] = set()
        self.missing: list[tuple[int, int]] = []
        self.extra: list[tuple[int, int]] = []
        self.elsewhere: list[tuple[int, int]] = []
        self.candidate_moves = False  # True if one of those also moves the candidate's
        self.touched: dict[str, Tensor] = {}  # elements that move with slices whose influence is wrong
        self.at: int | None = None  # the current slice
        self.steps: set[int] | None = (
            set()
        )  # distance of a leak from the single row that the slice belongs to; None: it belongs to several
        self.rows = 0

    def find(self) -> Influence | None:
        ends = [(0, 0), (self.length - 1, self.length - 1)]
        states = [self.state(*e) for e in ends]
        middle = (1, self.length - 2)
        self._note(ends[0], states[0])
        if middle[0] <= middle[1]:
            self._halve(*middle, states[0], states[1])
        self._note(ends[1], states[1])
        self._search_borders()
        if self.spent():  # slices that were not examined count as right, so the ranges would mean nothing
            return None
        if not self.missing and not self.extra:
            return None
        if self.missing and not self.extra and not self.candidate_moves:
            return Influence(self.name, self.axis, (), (), tuple(sorted(self.outputs)), length=self.length, none=True)
        return Influence(
            self.name, self.axis, tuple(joined(self.missing)), tuple(joined(self.extra)), tuple(sorted(self.outputs)),
            elsewhere=tuple(joined(self.elsewhere)), length=self.length, reached=self._reached(),
            onto=_onto(self.steps or set(), self.rows),
        )  # fmt: skip

    def _reached(self) -> float:
        """The share of the examined wrong elements that moves with those slices."""
        count = moved = 0
        for name, where in self.touched.items():
            bounded, mine = self.examination.ref.bounded[name], self.first[name]
            wrong = ~((mine.double() - bounded.value).abs() <= SLACK * bounded.bound) & (mine != bounded.value)
            count, moved = count + int(wrong.sum()), moved + int((wrong & where).sum())
        return moved / count if count else 1.0

    def _search_borders(self) -> None:
        """The slices on both sides of each group border, if an input gives the borders: bisection would skip them."""
        for border in _borders(self.examination, self.length):
            for place, step in ((border, 1), (border - 1, -1)):
                while 0 <= place < self.length and not self._known(place):
                    state = self.state(place, place)
                    # influence that every group lacks shows in the first and last group
                    if state not in (EXTRA, ELSEWHERE):
                        break
                    self._note((place, place), state)
                    place += step

    def _known(self, place: int) -> bool:
        return any(lo <= place <= hi for lo, hi in (*self.missing, *self.extra))

    def _halve(self, lo: int, hi: int, before: str, after: str) -> None:
        """Bisect between two known slices: if they agree, one slice in the middle decides; otherwise find the edge."""
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
        """The state of these slices; unknown counts as agreeing, and of several results the most telling one counts."""
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
        run = examination.execute(PROBE, f"influence of {self.name}", material=material, look=False)
        if run.error is not None:
            return SAME
        ref = examination.references(material, run, own_decisions(examination, run))
        worst = SAME
        try:
            now = ref.plain
            for name, (_, tensor) in named(run).items():
                if name not in self.wrong or tensor is None or name in examination.target.decisions:
                    continue
                if not self._may_move(name, tensor, now):
                    continue
                effect, where = self._moved(name, tensor, ref)
                if effect != SAME:
                    self.outputs.add(name)
                    self.touched[name] = self.touched.get(name, torch.zeros_like(where)) | where
                worst = max(worst, effect, key=_STATES.index)
        except GoldenError:
            return SAME
        return worst

    def _may_move(self, name: str, tensor: Tensor, now: dict[str, Tensor]) -> bool:
        """True if `_moved` may find a difference: the golden's numbers without bounds usually rule it out cheaply."""
        after, before, mine = now.get(name), self.examination.ref.plain.get(name), self.first.get(name)
        bounded = self.examination.ref.bounded.get(name)
        if after is None or before is None or mine is None or bounded is None or after.shape != tensor.shape:
            return False
        goes = after != before
        still = tensor == mine
        self.candidate_moves |= bool((goes & ~still).any())
        if bool((goes & still).any()):
            return True
        step = (tensor.double() - mine.double()).abs()
        return bool((~goes & (step > 4 * SLACK * bounded.bound) & torch.isfinite(step)).any())

    def _moved(self, name: str, tensor: Tensor, ref: GoldenResults) -> tuple[str, Tensor]:
        """(state, mask of the elements that show it).

        MISSING: elements change in the golden, and none in the candidate. EXTRA: an element changes only in the
        candidate. ELSEWHERE: like EXTRA, but some elements that change in the golden do not change in the candidate. A
        golden's element counts as changed beyond rounding, a candidate's if any bit differs. The mask is the golden's
        if influence is missing, otherwise the candidate's.
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
        # a transform over a whole axis moves every element by the rounding of the largest; integers have no rounding
        if bool(leaks.any()) and tensor.is_floating_point():
            leaks &= ~(step <= rounding(self.examination, name, ref))
        self._leaked(moves, leaks)
        if not bool(leaks.any()):
            return MISSING if bool(moves.any()) and bool(still[moves].all()) else SAME, moves
        return ELSEWHERE if bool(still[moves].any()) else EXTRA, ~still

    def _leaked(self, moves: Tensor, leaks: Tensor) -> None:
        """Distances of the leak from the slice's own row of the result, if the golden has only that row."""
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
    """A name for rows at these distances, of this many rows."""
    if not steps:
        return ""
    if min(steps) > 0:
        return "next" if steps == {1} and length > 2 else "later"
    if max(steps) < 0:
        return "last" if steps == {-1} and length > 2 else "earlier"
    return "other"


def _borders(examination: Examination, length: int) -> list[int]:
    """Where groups of slices of an axis begin: from offsets among the inputs that end where the axis ends."""
    borders: list[int] = []
    for t in examination.material.inputs.values():
        offsets = not t.is_floating_point() and t.dtype != torch.bool and t.dim() == 1 and len(t) > 2
        if offsets and int(t[-1]) == length and bool((t.diff() >= 0).all()):
            borders += [b for b in t.unique().tolist() if 0 < b < length]
    return borders[:_BORDERS]
