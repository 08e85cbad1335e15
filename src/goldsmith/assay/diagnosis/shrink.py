"""The smallest case that still fails in the same way: first its sizes, then its values, then its layout.

What "in the same way" means the caller says: `keeps(trial)` runs the trial and compares stage and cause. Sizes need not
be monotone (a mask is wrong at 33 and at 100, and right at 64), so each is tried from below before the gap to the
largest value that does not keep the failure is bisected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..declare.case import Case, Make
from ..golden.golden_error import GoldenError

MOST_RUNS = 64
SMALLEST = (0, 1, 2, 3)


@dataclass(frozen=True)
class Trial:
    """A case to try, and the layouts (input or "grad_<output>" -> name) that it is tried in."""

    case: Case
    layouts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shrunk:
    """The smallest trial that was found, how many runs that took, and what was done, in words.

    partial  the runs ended before everything was tried
    """

    trial: Trial
    runs: int
    steps: tuple[str, ...] = ()
    partial: bool = False

    @property
    def case(self) -> Case:
        return self.trial.case


class _Spent(Exception):
    """No run is left."""


class _Search:
    """The best trial so far, and the runs that are left."""

    def __init__(
        self, trial: Trial, keeps: Callable[[Trial], bool], runs: int, spent: Callable[[float], bool],
        costs: Callable[[Trial], float],
    ):  # fmt: skip
        self.best, self.keeps, self.most, self.spent, self.costs = trial, keeps, runs, spent, costs
        self.runs = 0
        self.took: list[tuple[float, float]] = []  # of every trial: seconds that were foretold, and seconds
        self.steps: list[str] = []
        self.kept: list[tuple[Trial, tuple[str, ...]]] = [(trial, ())]  # after every step

    def did(self, step: str) -> None:
        self.steps.append(step)
        self.kept.append((self.best, tuple(self.steps)))

    def tried(self, trial: Trial) -> bool:
        """Whether a trial keeps the failure; then it is the best. What cannot be drawn or judged does not keep it."""
        foretold = self.costs(trial)
        longest = max((seconds for other, seconds in self.took if other <= foretold), default=0.0)
        if self.runs >= self.most or self.spent(max(longest, foretold)):
            raise _Spent
        self.runs += 1
        began = time.perf_counter()
        try:
            kept = self.keeps(trial)
        except (TargetError, GoldenError):
            kept = False
        self.took.append((foretold, time.perf_counter() - began))
        if kept:
            self.best = trial
        return kept


def shrink(
    case: Case,
    keeps: Callable[[Trial], bool],
    *,
    layouts: Mapping[str, str] | None = None,
    least: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    runs: int = MOST_RUNS,
    spent: Callable[[float], bool] = lambda more: False,
    costs: Callable[[Trial], float] = lambda trial: 0.0,
    tells: Callable[[Trial], bool] = lambda trial: True,
) -> Shrunk:
    """The smallest trial for which `keeps` says yes, within so many calls of it and until `spent(more)`, which says
    whether time is over, or would be so many seconds later; `costs` says how many a trial takes. `case` itself is taken
    to be kept. No size goes below `least`. `tells` says whether a case is still large enough to tell what is wrong from
    all else: of the steps the last ones are taken back until it is, some five calls of it for a hundred steps.

    Sizes of a drawn case are walked down; of given tensors, axes of equal length are cut together. Then every input in
    turn becomes zeros, ones, or whole numbers, and lies densely.
    """
    search = _Search(Trial(case, dict(layouts or {})), keeps, runs, spent, costs)
    partial = False
    try:
        _sizes(search, _axes(case, dtype, seed) if case.given else None, least or {})
        _values(search, dtype, seed)
        _layouts(search, dtype, seed)
    except _Spent:
        partial = True
    if search.best is not search.kept[-1][0]:  # time was over in the middle of a step
        search.kept.append((search.best, tuple(search.steps)))
    best, steps = _telling(search.kept, tells)
    return Shrunk(best, search.runs, steps, partial)


def _telling(
    kept: list[tuple[Trial, tuple[str, ...]]], tells: Callable[[Trial], bool]
) -> tuple[Trial, tuple[str, ...]]:
    """The last of these that tells, as a search by halves finds it; the smallest where not even the first does."""
    low, high = 0, len(kept) - 1
    middle = high
    while low < high:
        low, high = (middle, high) if tells(kept[middle][0]) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return kept[low] if low or tells(kept[0][0]) else kept[-1]


# sizes

Remake = Callable[[Mapping[str, int]], Case]


def _sizes(search: _Search, cut: Remake | None, least: Mapping[str, int]) -> None:
    start = search.best.case
    if cut is None:
        sizes = {k: v for k, v in start.sizes.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}
        remake: Remake = lambda now: resized(start, now)  # noqa: E731 - named like the other
    else:
        sizes, remake = dict(_lengths(cut)), cut
    now, seen = dict(sizes), {tuple(sizes.values()): True}

    def keeps(name: str, value: int) -> bool:
        other = {**now, name: value}
        key = tuple(other.values())
        if value < least.get(name, 0):
            return False
        if key not in seen:
            seen[key] = search.tried(Trial(remake(other), search.best.layouts))
        return seen[key]

    changed = True
    while changed:
        changed = False
        for name in sorted(now, key=lambda n: -now[n]):
            smaller = _smaller(now[name], lambda value, name=name: keeps(name, value))  # type: ignore[misc]
            if smaller < now[name]:
                search.did(f"{name}: {now[name]} -> {smaller}")
                now[name], changed = smaller, True


def _smaller(value: int, keeps: Callable[[int], bool]) -> int:
    """The smallest value found that keeps the failure: rungs from below, then the gap below the first is bisected."""
    rungs = sorted({n for n in (*SMALLEST, value // 8, value // 4, value // 2, value - 1) if n < value})
    low = -1
    for rung in rungs:
        if keeps(rung):
            value = rung
            break
        low = rung
    while value - low > 1:
        middle = (low + value) // 2
        if keeps(middle):
            value = middle
        else:
            low = middle
    return value


def resized(case: Case, sizes: Mapping[str, Any]) -> Case:
    """The same case with other sizes, and a name that says them."""
    now = {**case.sizes, **sizes}
    label = ",".join(f"{k}={v}" for k, v in now.items())
    return replace(case, sizes=now, name=f"{case.name.split('[')[0]}[{label}]" if label else case.name)


class _CutCase:
    """A given case with its axes cut: axes of one length, in whatever input, are taken to be the same axis."""

    def __init__(self, case: Case, inputs: Mapping[str, Any]):
        self.case = case
        tensors = [v for v in inputs.values() if isinstance(v, Tensor)]
        self.lengths = {str(n): n for n in sorted({n for t in tensors for n in t.shape if n > 0})}

    def __call__(self, now: Mapping[str, int]) -> Case:
        drawn = self.case.draw

        def draw(make: Make) -> dict[str, Any]:
            return {n: _narrowed(v, now) if isinstance(v, Tensor) else v for n, v in drawn(make).items()}

        label = ",".join(f"{old}->{new}" for old, new in now.items() if int(old) != new)
        return replace(self.case, draw=draw, name=f"{self.case.name}[{label}]" if label else self.case.name)


def _axes(case: Case, dtype: torch.dtype, seed: int) -> _CutCase:
    return _CutCase(case, case.build(dtype, "cpu", seed))


def _lengths(cut: Remake) -> dict[str, int]:
    return cut.lengths if isinstance(cut, _CutCase) else {}


def _narrowed(tensor: Tensor, now: Mapping[str, int]) -> Tensor:
    for axis, length in enumerate(tensor.shape):
        tensor = tensor.narrow(axis, 0, now.get(str(length), length))
    return tensor if 0 in tensor.stride() else tensor.clone()


# values

SIMPLER: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "whole numbers": lambda t: (4 * t).round().clamp(-8, 8),
}


def _values(search: _Search, dtype: torch.dtype, seed: int) -> None:
    for name, tensor in _tensors(search, dtype, seed):
        for what, simpler in SIMPLER.items():
            if not tensor.is_floating_point() and what != "zeros":
                continue
            if torch.equal(simpler(tensor), tensor):
                break  # it is as simple as that already
            case = _changed(search.best.case, name, simpler)
            if search.tried(replace(search.best, case=case)):
                search.did(f"{name}: {what}")
                break


def _layouts(search: _Search, dtype: torch.dtype, seed: int) -> None:
    for name in list(search.best.layouts):
        left = {k: v for k, v in search.best.layouts.items() if k != name}
        if search.tried(replace(search.best, layouts=left)):
            search.did(f"{name}: plain layout")
    for name, tensor in _tensors(search, dtype, seed):
        if not tensor.is_contiguous():
            case = _changed(search.best.case, name, lambda t: t.contiguous())
            if search.tried(replace(search.best, case=case)):
                search.did(f"{name}: contiguous")


def _tensors(search: _Search, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    drawn = search.best.case.build(dtype, "cpu", seed)
    return iter([(n, v) for n, v in drawn.items() if isinstance(v, Tensor) and v.numel()])


def _changed(case: Case, name: str, change: Callable[[Tensor], Tensor]) -> Case:
    """The case with one input changed; its name stays, for the draws depend on it."""
    drawn = case.draw

    def draw(make: Make, **sizes: Any) -> dict[str, Any]:
        supply = drawn(make, **sizes)
        return {**supply, name: change(supply[name])}

    return replace(case, draw=draw)
