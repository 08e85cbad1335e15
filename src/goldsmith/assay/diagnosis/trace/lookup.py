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


class _SortedTensors:
    """Golden tensors of about one size: a row of distinct elements in order for each, filled up with infinity.

    scales: their root mean squares; places: where each stands among all tensors
    """

    def __init__(self, members: Sequence[tuple[int, str, Tensor, float]]):
        self.places, self.names = [m[0] for m in members], [m[1] for m in members]
        self.sizes = [m[2].numel() for m in members]
        self.rows = torch.full((len(members), max(self.sizes) + 1), math.inf, dtype=torch.float64)
        for row, member in zip(self.rows, members, strict=True):
            row[: member[2].numel()] = member[2]
        self.scales = torch.tensor([[m[3]] for m in members], dtype=torch.float64)

    def has(self, numbers: Tensor, roundoff: float, negated: bool, rows: slice = slice(None)) -> Tensor:
        """Mask [tensors, elements]: whether each of these tensors holds each element."""
        n = (-numbers if negated else numbers).to(torch.float64)
        slack = _ROUNDINGS * roundoff * (n.abs() + 0.05 * self.scales[rows])
        at = torch.searchsorted(self.rows[rows], n - slack)
        return self.rows[rows].gather(1, at) <= n + slack


class Lookup:
    """The golden's tensors of reals; a group's tensors are also searched together."""

    def __init__(self, values: Sequence[GoldenValue]):
        real = [v for v in values if v.numbers.is_floating_point()]
        groups: dict[int, list[GoldenValue]] = {}
        for value in real:
            groups.setdefault(value.group, []).append(value)
        joined = [members for group, members in groups.items() if group and len(members) > 1]
        named = [(v.name, v.numbers.reshape(-1)) for v in real]
        named += [(m[0].name, torch.cat([v.numbers.reshape(-1) for v in m])) for m in joined]
        sizes: dict[int, list[tuple[int, str, Tensor, float]]] = {}
        known = set[tuple[bytes, float]]()  # views and copies are found under the first name
        for place, (name, numbers) in enumerate(named):
            finite = numbers[torch.isfinite(numbers)].double()
            distinct, scale = torch.unique(finite), float(finite.square().mean().sqrt())
            key = distinct.numpy().tobytes(), scale
            if finite.numel() and key not in known:
                known.add(key)
                sizes.setdefault(distinct.numel().bit_length() // 2, []).append((place, name, distinct, scale))
        self.tables = [_SortedTensors(members) for _, members in sorted(sizes.items())]

    def find(self, numbers: Tensor, roundoff: float) -> NumberMatch | None:
        """The golden tensor that holds all of these elements; the smallest one, and one without a sign if possible."""
        told = informative(numbers, roundoff)
        few = told[:: max(1, told.numel() // _FEW)][:_FEW]
        for negated in (False, True) if told.numel() else ():
            fitting = [
                (tables.sizes[row], tables.places[row], row, tables)
                for tables in self.tables
                for row in tables.has(few, roundoff, negated).all(1).nonzero().flatten().tolist()
            ]
            for _, _, row, tables in sorted(fitting, key=lambda f: f[:2]):
                if bool(tables.has(told, roundoff, negated, slice(row, row + 1)).all()):
                    if self._evidence(tables, row, told, roundoff, negated) >= _ENOUGH:
                        return NumberMatch(tables.names[row], told.numel(), negated)
        return None

    def _evidence(self, tables: _SortedTensors, row: int, told: Tensor, roundoff: float, negated: bool) -> float:
        """Bits: how unlikely it is that elements of other values would all be found."""
        count = told.numel()
        copies = max(1, 64 // count)
        step = torch.linspace(0.004, 0.03, count * copies, dtype=told.dtype)
        decoys = told.repeat(copies) * (1 + step)
        chance = float(tables.has(decoys, roundoff, negated, slice(row, row + 1)).double().mean())
        least = max(2 * _ROUNDINGS * roundoff * tables.sizes[row], 1e-9)
        return -count * math.log2(min(1.0, max(chance, min(least, 0.5))))

    def missing(self, numbers: Tensor, roundoff: float) -> tuple[int, int]:
        """(elements compared, those that no golden tensor has)"""
        told = informative(numbers, roundoff)
        if not told.numel():
            return 0, 0
        signs = [(tables, sign) for tables in self.tables for sign in (False, True)]
        best = max((int(tables.has(told, roundoff, sign).sum(1).max()) for tables, sign in signs), default=0)
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
