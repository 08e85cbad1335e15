"""Lookup: finds the numbers of a step among the golden's, up to layout, tiling and sign.

A step's elements are compared as a set: each must be an element of one golden tensor. So order, shape and tiling do not
matter. Zeros, ones and small integers say nothing. How much the rest says is measured with decoys: the same elements,
each moved by about one per cent. What also finds its decoys finds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FEW = 24  # elements that a first look compares
_ENOUGH = 13.0  # bits of evidence
_ALONE = 40  # parts of a step that are looked for one by one, at most
_ROUNDINGS = 48.0  # errors of a right step, in units of roundoff
_MOST = 4096  # elements of a step


@dataclass(frozen=True)
class GoldenValue:
    """One tensor of the golden. group: values with the same number are made by the same line of a loop; 0: by none."""

    name: str
    numbers: Tensor
    group: int


@dataclass(frozen=True)
class NumberMatch:
    """name: of the golden tensor; matched: distinct elements; missing: without an equal, of `compared`."""

    name: str
    matched: int
    negated: bool = False


@dataclass
class _Sorted:
    """A golden tensor's elements in order; scale: their root mean square."""

    name: str
    up: Tensor
    scale: float

    @staticmethod
    def of(name: str, numbers: Tensor) -> _Sorted | None:
        finite = numbers[torch.isfinite(numbers)]
        if not finite.numel():
            return None
        return _Sorted(name, torch.unique(finite), float(finite.square().mean().sqrt()))

    def has(self, numbers: Tensor, roundoff: float, negated: bool) -> Tensor:
        """Mask of the elements that this tensor holds."""
        n = -numbers if negated else numbers
        slack = _ROUNDINGS * roundoff * (n.abs() + 0.05 * self.scale)
        at = torch.searchsorted(self.up, n - slack)
        inside = at < self.up.numel()
        return inside & (self.up[at.clamp_max(self.up.numel() - 1)] <= n + slack)


class Lookup:
    """The golden's tensors of reals; a group's tensors are also searched together."""

    def __init__(self, values: Sequence[GoldenValue]):
        real = [v for v in values if v.numbers.is_floating_point()]
        groups: dict[int, list[GoldenValue]] = {}
        for value in real:
            groups.setdefault(value.group, []).append(value)
        joined = [members for group, members in groups.items() if group and len(members) > 1]
        tables = [_Sorted.of(v.name, v.numbers.reshape(-1)) for v in real]
        tables += [_Sorted.of(m[0].name, torch.cat([v.numbers.reshape(-1) for v in m])) for m in joined]
        self.tables = [t for t in tables if t is not None]

    def find(self, numbers: Tensor, roundoff: float) -> NumberMatch | None:
        """The golden tensor that holds all of these elements; the smallest one, and one without a sign if possible."""
        told = informative(numbers, roundoff)
        if not told.numel():
            return None
        few = told[:: max(1, told.numel() // _FEW)][:_FEW]
        best: tuple[tuple[bool, int], NumberMatch] | None = None
        for negated in (False, True):
            for table in self.tables:
                if best is not None and best[0] <= (negated, table.up.numel()):
                    continue
                if not bool(table.has(few, roundoff, negated).all()) or not bool(
                    table.has(told, roundoff, negated).all()
                ):
                    continue
                if self._evidence(table, told, roundoff, negated) >= _ENOUGH:
                    best = (negated, table.up.numel()), NumberMatch(table.name, told.numel(), negated)
        return None if best is None else best[1]

    def _evidence(self, table: _Sorted, told: Tensor, roundoff: float, negated: bool) -> float:
        """Bits: how unlikely it is that elements of other values would all be found."""
        count = told.numel()
        copies = max(1, 64 // count)
        step = torch.linspace(0.004, 0.03, count * copies, dtype=told.dtype)
        decoys = told.repeat(copies) * (1 + step)
        chance = float(table.has(decoys, roundoff, negated).double().mean())
        least = max(2 * _ROUNDINGS * roundoff * table.up.numel(), 1e-9)
        return -count * math.log2(min(1.0, max(chance, min(least, 0.5))))

    def missing(self, numbers: Tensor, roundoff: float) -> tuple[int, int]:
        """(elements compared, those that no golden tensor has)"""
        told = informative(numbers, roundoff)
        if not told.numel():
            return 0, 0
        best = 0
        for table in self.tables:
            best = max(best, max(int(table.has(told, roundoff, sign).sum()) for sign in (False, True)))
        return told.numel(), told.numel() - best


def informative(numbers: Tensor, roundoff: float) -> Tensor:
    """Distinct elements that are evidence: finite, and neither small integers nor halves of them."""
    finite = numbers[torch.isfinite(numbers)]
    twice = 2 * finite
    plain = (twice == twice.round()) & (finite.abs() <= 64)
    told = torch.unique(finite[~plain])
    if told.numel() > 1:  # values that differ by roundings alone are one
        apart = told.diff() > 4 * roundoff * told[1:].abs()
        told = told[torch.cat([torch.ones(1, dtype=torch.bool), apart])]
    if told.numel() > _MOST:
        told = told[torch.linspace(0, told.numel() - 1, _MOST).long()]
    return told


def look_up(
    lookup: Lookup, parts: Sequence[Tensor], last: Sequence[int], roundoff: float
) -> tuple[NumberMatch | None, int]:
    """(match, elements) of a step with these parts.

    All parts in one golden tensor, or each in one; for a running sum, the last part of every program.
    """
    if not parts:
        return None, 0
    every = torch.cat(list(parts))
    told = informative(every, roundoff).numel()
    if not told:
        return None, 0
    match = lookup.find(every, roundoff)
    if match is not None or len(parts) == 1:
        return match, told
    final = [parts[i] for i in last]
    match = lookup.find(torch.cat(final), roundoff) if len(final) < len(parts) else None
    if match is not None:
        return match, told
    each = [parts[i] for i in range(0, len(parts), max(1, len(parts) // _ALONE))]
    matches = []
    for part in each:
        if not informative(part, roundoff).numel():
            continue
        match = lookup.find(part, roundoff)
        if match is None:
            return None, told
        matches.append(match)
    if not matches:
        return None, told
    return NumberMatch(matches[0].name, sum(m.matched for m in matches), all(m.negated for m in matches)), told
