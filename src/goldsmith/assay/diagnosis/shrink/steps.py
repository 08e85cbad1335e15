"""Finds the smallest case that still fails in the same way: first smaller sizes, then simpler values and layouts.

The caller defines "in the same way": `still_fails(case)` runs the case and compares stage and cause. A smaller size
may pass although an even smaller one fails (a mask may be wrong at 33 and 100, and right at 64). So the search tries
small sizes first. Then it bisects between the smallest size that fails and the largest one below that passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
class Shrunk:
    """The smallest failing case, the number of runs that found it, and the steps in words.

    partial  the runs or the time ended before everything was tried
    """

    case: Case
    runs: int
    steps: tuple[str, ...] = ()
    partial: bool = False


class _BudgetSpent(Exception):
    """No run or no time is left."""


class _Search:
    """The smallest failing case so far, the steps that led to it, and the number of runs."""

    def __init__(self, case: Case, still_fails: Callable[[Case], bool], runs: int, spent: Callable[[], bool]):
        self.best, self.still_fails, self.max_runs, self.spent = case, still_fails, runs, spent
        self.runs = 0
        self.steps: list[str] = []

    def try_out(self, case: Case) -> bool:
        """Run a case, and make it the best if it still fails. A case that cannot be drawn or judged does not."""
        if self.runs >= self.max_runs or self.spent():
            raise _BudgetSpent
        self.runs += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a smaller input causes them, e.g. the variance of a single number
                fails = self.still_fails(case)
        except (TargetError, GoldenError):
            return False
        if fails:
            self.best = case
        return fails


def shrink(
    case: Case, still_fails: Callable[[Case], bool], *, least: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, runs: int = MOST_RUNS, spent: Callable[[], bool] = lambda: False,
) -> Shrunk:  # fmt: skip
    """The smallest case for which `still_fails` is True.

    still_fails  called at most `runs` times; `case` itself is assumed to fail
    spent        True if the time is over
    least        lower limits of sizes

    Sizes of a drawn case are lowered; for given tensors, axes of equal length are cut together. Then the search makes
    each input in turn zeros, ones or whole numbers, and contiguous.
    """
    search, partial_search = _Search(case, still_fails, runs, spent), False
    try:
        _sizes(search, _CutCase(case, case.build(dtype, "cpu", seed)) if case.given else None, least or {})
        _values(search, dtype, seed)
    except _BudgetSpent:
        partial_search = True
    return Shrunk(search.best, search.runs, tuple(search.steps), partial_search)


# sizes

Remake = Callable[[Mapping[str, int]], Case]


def _sizes(search: _Search, cut: _CutCase | None, least: Mapping[str, int]) -> None:
    start = search.best
    if cut is None:
        sizes = {k: v for k, v in start.sizes.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}
        remake: Remake = lambda now: resized(start, now)  # noqa: E731 - named like the other
    else:
        sizes, remake = dict(cut.lengths), cut
    now, seen = dict(sizes), {tuple(sizes.values()): True}

    def still_fails(name: str, value: int) -> bool:
        other = {**now, name: value}
        key = tuple(other.values())
        if value < least.get(name, 0):
            return False
        if key not in seen:
            seen[key] = search.try_out(remake(other))
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
                search.steps.append(f"{name}: {now[name]} -> {smaller}")
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
            if search.try_out(_changed(search.best, name, simpler)):
                search.steps.append(f"{name}: {form}")
                break
    for name, tensor in _tensors(search, dtype, seed):
        if not tensor.is_contiguous() and search.try_out(_changed(search.best, name, Tensor.contiguous)):
            search.steps.append(f"{name}: contiguous")


def _tensors(search: _Search, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    drawn = search.best.build(dtype, "cpu", seed)
    return iter([(n, v) for n, v in drawn.items() if isinstance(v, Tensor) and v.numel()])


def _changed(case: Case, name: str, change: Callable[[Tensor], Tensor]) -> Case:
    """The case with one input changed. Its name stays, because draws depend on it."""
    drawn = case.draw

    def draw(make: Make, **sizes: object) -> dict[str, object]:
        supply = drawn(make, **sizes)
        return {**supply, name: change(supply[name])}

    return replace(case, draw=draw)
