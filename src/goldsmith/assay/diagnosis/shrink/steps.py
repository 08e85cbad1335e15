"""Finds the smallest case that still fails in the same way: first smaller sizes, then simpler values and layouts.

The caller defines "in the same way": `still_fails(trial)` runs the trial and compares stage and cause. A smaller size
may pass although an even smaller one fails (a mask may be wrong at 33 and 100, and right at 64). So the search tries
small sizes first. Then it bisects between the smallest size that fails and the largest one below that passes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ....core.tracing import TargetError
from ...declare.case import Case, Make
from ...golden.golden_error import GoldenError

MOST_RUNS = 64
SMALLEST = (0, 1, 2, 3)
_NEARBY = 64  # sizes that are asked for, one after another, if a case has a `where`


@dataclass(frozen=True)
class Trial:
    """A case to try, and its layouts (input or "grad_<output>" -> name)."""

    case: Case
    layouts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shrunk:
    """The smallest failing trial, the number of runs that found it, and the steps in words.

    partial  the runs or the time ended before everything was tried
    """

    trial: Trial
    runs: int
    steps: tuple[str, ...] = ()
    partial: bool = False

    @property
    def case(self) -> Case:
        return self.trial.case


class _BudgetSpent(Exception):
    """No run or no time is left."""


class _Search:
    """The smallest failing trial so far, the steps that led to it, and the runs and times of all trials."""

    def __init__(
        self, trial: Trial, still_fails: Callable[[Trial], bool], runs: int, spent: Callable[[float], bool],
        predict: Callable[[Trial], float],
    ):  # fmt: skip
        self.best, self.still_fails, self.max_runs, self.spent, self.predict = trial, still_fails, runs, spent, predict
        self.runs = 0
        self.times: list[tuple[float, float]] = []  # (predicted, measured) seconds of every trial
        self.steps: list[str] = []
        self.history: list[tuple[Trial, tuple[str, ...]]] = [(trial, ())]  # after every step

    def record(self, step: str) -> None:
        self.steps.append(step)
        self.history.append((self.best, tuple(self.steps)))

    def try_out(self, trial: Trial) -> bool:
        """Run a trial, and make it the best if it still fails. A trial that cannot be drawn or judged does not."""
        predicted = self.predict(trial)
        longest = max((seconds for other, seconds in self.times if other <= predicted), default=0.0)
        if self.runs >= self.max_runs or self.spent(max(longest, predicted)):
            raise _BudgetSpent
        self.runs += 1
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a smaller input causes them, e.g. the variance of a single number
                fails = self.still_fails(trial)
        except (TargetError, GoldenError):
            fails = False
        self.times.append((predicted, time.perf_counter() - began))
        if fails:
            self.best = trial
        return fails


def shrink(
    case: Case,
    still_fails: Callable[[Trial], bool],
    *,
    layouts: Mapping[str, str] | None = None,
    least: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    runs: int = MOST_RUNS,
    spent: Callable[[float], bool] = lambda more: False,
    predict: Callable[[Trial], float] = lambda trial: 0.0,
    shows_cause: Callable[[Trial], bool] = lambda trial: True,
) -> Shrunk:
    """The smallest trial for which `still_fails` is True.

    still_fails  called at most `runs` times; `case` itself is assumed to fail
    spent        spent(more) is True if the time is over, or would be after `more` seconds
    predict      the expected seconds of a trial
    least        lower limits of sizes
    shows_cause  True if a case is still large enough to show the cause. Otherwise the last steps are undone until it
                 is, with about five calls for a hundred steps.

    Sizes of a drawn case are lowered; for given tensors, axes of equal length are cut together. Then the search makes
    each input in turn zeros, ones or whole numbers, and contiguous.
    """
    search = _Search(Trial(case, dict(layouts or {})), still_fails, runs, spent, predict)
    partial = False
    try:
        _sizes(search, _axes(case, dtype, seed) if case.given else None, least or {})
        _values(search, dtype, seed)
        _layouts(search, dtype, seed)
    except _BudgetSpent:
        partial = True
    if search.best is not search.history[-1][0]:  # the time ended within a step
        search.history.append((search.best, tuple(search.steps)))
    best, steps = _last_that_shows(search.history, shows_cause)
    return Shrunk(best, search.runs, steps, partial)


def _last_that_shows(
    steps: list[tuple[Trial, tuple[str, ...]]], shows_cause: Callable[[Trial], bool]
) -> tuple[Trial, tuple[str, ...]]:
    """The last step for which `shows_cause` is True, by bisection; the smallest trial if it is False for all."""
    low, high = 0, len(steps) - 1
    middle = high
    while low < high:
        low, high = (middle, high) if shows_cause(steps[middle][0]) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return steps[low] if low or shows_cause(steps[0][0]) else steps[-1]


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

    def still_fails(name: str, value: int) -> bool:
        other = {**now, name: value}
        key = tuple(other.values())
        if value < least.get(name, 0):
            return False
        if key not in seen:
            seen[key] = search.try_out(Trial(remake(other), search.best.layouts))
        return seen[key]

    def allowed(name: str, value: int) -> bool:
        """Whether the case can be drawn at that size, as far as its `where` says."""
        if start.where is not None:
            try:
                remake({**now, name: value}).build()
            except TargetError:
                return False
        return True

    changed = True
    while changed:
        changed = False
        for name in sorted(now, key=lambda n: -now[n]):
            smaller = _smaller(now[name], partial(still_fails, name), partial(allowed, name))
            if smaller < now[name]:
                search.record(f"{name}: {now[name]} -> {smaller}")
                now[name], changed = smaller, True


def _smaller(value: int, still_fails: Callable[[int], bool], allowed: Callable[[int], bool]) -> int:
    """The smallest value that still fails: tries a few values from below, then bisects below the first that fails."""
    guesses = sorted({n for n in (*SMALLEST, value // 8, value // 4, value // 2, value - 1) if n < value})
    low = -1
    for guess in guesses:
        guess = _next(max(guess, low + 1), value, allowed)
        if still_fails(guess):
            value = guess
            break
        low = guess
    while value - low > 1:
        middle = _next((low + value) // 2, value, allowed)
        if middle < value and still_fails(middle):
            value = middle
        else:
            low = (low + value) // 2 if middle == value else middle
    return value


def _next(guess: int, value: int, allowed: Callable[[int], bool]) -> int:
    """The first allowed size from `guess` on, below `value`; `value` if there is none nearby."""
    return next((n for n in range(guess, min(value, guess + _NEARBY)) if allowed(n)), value)


def resized(case: Case, sizes: Mapping[str, object]) -> Case:
    """The same case with other sizes, and a name that states them."""
    now = {**case.sizes, **sizes}
    label = ",".join(f"{k}={v}" for k, v in now.items())
    return replace(case, sizes=now, name=f"{case.name.split('[')[0]}[{label}]" if label else case.name)


class _CutCase:
    """Makes a given case with shorter axes; axes of equal length in any input count as the same axis."""

    def __init__(self, case: Case, inputs: Mapping[str, object]):
        self.case = case
        tensors = [v for v in inputs.values() if isinstance(v, Tensor)]
        self.lengths = {str(n): n for n in sorted({n for t in tensors for n in t.shape if n > 0})}

    def __call__(self, now: Mapping[str, int]) -> Case:
        drawn = self.case.draw

        def draw(make: Make) -> dict[str, object]:
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
        for form, simpler in SIMPLER.items():
            if not tensor.is_floating_point() and form != "zeros":
                continue
            if torch.equal(simpler(tensor), tensor):
                break  # it is already this simple
            case = _changed(search.best.case, name, simpler)
            if search.try_out(replace(search.best, case=case)):
                search.record(f"{name}: {form}")
                break


def _layouts(search: _Search, dtype: torch.dtype, seed: int) -> None:
    for name in list(search.best.layouts):
        left = {k: v for k, v in search.best.layouts.items() if k != name}
        if search.try_out(replace(search.best, layouts=left)):
            search.record(f"{name}: plain layout")
    for name, tensor in _tensors(search, dtype, seed):
        if not tensor.is_contiguous():
            case = _changed(search.best.case, name, lambda t: t.contiguous())
            if search.try_out(replace(search.best, case=case)):
                search.record(f"{name}: contiguous")


def _tensors(search: _Search, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    drawn = search.best.case.build(dtype, "cpu", seed)
    return iter([(n, v) for n, v in drawn.items() if isinstance(v, Tensor) and v.numel()])


def _changed(case: Case, name: str, change: Callable[[Tensor], Tensor]) -> Case:
    """The case with one input changed. Its name stays, because draws depend on it."""
    drawn = case.draw

    def draw(make: Make, **sizes: object) -> dict[str, object]:
        supply = drawn(make, **sizes)
        return {**supply, name: change(supply[name])}

    return replace(case, draw=draw)
