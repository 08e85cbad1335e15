"""Fits the residual y - g as a sum of golden intermediates: which term is missing, repeated, flipped or scaled?

Columns are term x factor, broadcast to the tensor and divided by the rounding bound, so that rows of different scale
weigh equally and rounding has unit size. Uses greedy forward selection, backward elimination, then least squares. The
golden is fitted on the same columns first: a residual of -1 times its own coefficient is a missing term.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..facts.evidence import Fit
from ..facts.numbers import name

_SAMPLE = 20_000  # elements at most, sampled with a fixed seed
_COLUMNS = 600
_TERMS = 6  # a mistake in one line changes few terms
_EXPLAINED = 0.9999  # share of the residual that a fit must explain: many columns explain much of anything
_ALIKE = 1.02  # an alternative may leave at most this factor more squares than the best
_COLLINEAR = 1e-9  # 1 - |cos| below which two columns count as one
_FLOOR = 1e-6  # relative to the golden; without a bound, smaller differences are no error
CONDITION = 1e6


@dataclass(frozen=True)
class _Column:
    term: str
    factor: str
    value: Tensor
    also: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.term if self.factor == "1" else f"{self.term} * {self.factor}"


@dataclass(frozen=True)
class _Solved:
    """Least squares on chosen columns: coefficients, their errors, the squares that remain, and the condition."""

    chosen: tuple[int, ...]
    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    left: float
    condition: float


def regress(
    tensor: str,
    got: Tensor,
    golden: Tensor,
    terms: Mapping[str, Tensor],
    *,
    factors: Mapping[str, Tensor] | None = None,
    bound: Tensor | None = None,
    numbers: Mapping[str, float] | None = None,
    where: str = "",
) -> list[Fit]:
    """The terms of `got`'s error; empty if few terms do not explain 99.99 % of it, or there is no error.

    terms    tensors that broadcast to the golden's shape (stages, inputs, output gradients, contributions of paths)
    factors  tensors that may multiply a term (per row, per column), and their pairs
    numbers  names for a coefficient
    """
    if got.shape != golden.shape or not golden.numel():
        return []
    weight = _weight(golden, bound)
    keep = torch.isfinite(got) & torch.isfinite(golden)
    residual = torch.where(keep, got - golden, 0.0) * weight
    if not bool(keep.all()) or not bool((residual.abs() > 1.02).any()):
        return []
    pick = _sample(golden.numel())
    weighted = weight.flatten()[pick]
    columns = _columns(tensor, golden, terms, factors or {}, pick, weighted)
    if not columns:
        return []
    matrix = torch.stack([c.value for c in columns], 1)
    r, g = residual.flatten()[pick], golden.flatten()[pick] * weighted
    total = float(r.square().sum())
    noise = float(len(pick))  # as if every element were at its bound
    solved = _select(matrix, r, noise)
    if solved is None or solved.left > (1 - _EXPLAINED) * total:
        return []
    own = _golden_coefficients(matrix, g, columns, tensor)
    fits = _fits(tensor, where, columns, matrix, r, solved, own, numbers or {}, noise)
    return _changed_factors(fits)


def _weight(golden: Tensor, bound: Tensor | None) -> Tensor:
    scale = float(golden.square().mean()) ** 0.5 or 1.0
    floor = _FLOOR * (golden.abs() + 1e-3 * scale)
    allowed = floor if bound is None else torch.where(torch.isfinite(bound), bound, floor)
    # an exact copy has bound 0, and the other elements must still count
    least = 1e-12 * scale
    return 1.0 / torch.where(allowed > least, allowed, max(least, float(allowed.median())))


def _sample(count: int) -> Tensor:
    if count <= _SAMPLE:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))[:_SAMPLE]


def _columns(
    tensor: str,
    golden: Tensor,
    terms: Mapping[str, Tensor],
    factors: Mapping[str, Tensor],
    pick: Tensor,
    weight: Tensor,
) -> list[_Column]:
    """The golden, the terms, then terms times factors; a column that is collinear with an earlier one joins it."""
    columns: list[_Column] = []
    directions = torch.empty(_COLUMNS, len(pick), dtype=torch.float64)  # of the columns, each of length 1

    def add(term: str, factor: str, value: Tensor) -> None:
        flat = value.flatten()[pick] * weight
        norm = float(flat.square().sum()) ** 0.5
        if not (0 < norm < float("inf")) or len(columns) >= _COLUMNS:
            return
        flat, count = flat.double(), len(columns)
        alike = 1 - (directions[:count] @ (flat / norm)).abs() < _COLLINEAR
        if bool(alike.any()):
            i = int(alike.nonzero()[0])
            other, label = columns[i], term if factor == "1" else f"{term} * {factor}"
            if label != other.label:
                columns[i] = replace(other, also=(*other.also, label))
            return
        directions[count] = flat / norm
        columns.append(_Column(term, factor, flat))

    add(tensor, "1", golden)
    usable = {n: _spread(t, golden) for n, t in terms.items() if n != tensor}
    fields = {n: _spread(f, golden) for n, f in _products(factors).items()}
    for term, value in usable.items():
        if value is not None:
            add(term, "1", value)
    for factor, field in fields.items():
        for term, value in usable.items():
            if value is not None and field is not None and factor != term:
                add(term, factor, value * field)
    return columns


def _products(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    items = list(factors.items())[:8]
    products = {n: f.double() for n, f in items}
    for i, (n, f) in enumerate(items):
        products[f"{n}^2"] = f.double().square()
        products[f"1/{n}"] = 1 / f.double()
        for m, other in items[i + 1 :]:
            try:
                products[f"{n} * {m}"] = f.double() * other.double()
            except RuntimeError:  # these two do not broadcast
                continue
    return products


def _spread(tensor: Tensor, like: Tensor) -> Tensor | None:
    try:
        wide = tensor.double().expand_as(like)
    except RuntimeError:
        return None
    return wide if bool(torch.isfinite(wide).all()) else None


# selection


def _select(matrix: Tensor, r: Tensor, noise: float) -> _Solved | None:
    """Add columns until rounding explains the rest, then drop those that are not needed."""
    chosen: list[int] = []
    best: _Solved | None = None
    basis = matrix / matrix.square().sum(0).sqrt()
    left = r
    total = float(r.square().sum())
    limit = min(_TERMS, max(1, len(r) // 4), matrix.shape[1])
    while len(chosen) < limit:
        fresh = basis - _projected(basis, matrix[:, chosen]) if chosen else basis
        norms = fresh.square().sum(0).sqrt()
        gains = torch.where(norms > 1e-5, (left @ fresh).square() / norms.square().clamp_min(1e-10), 0.0)
        pick = int(gains.argmax())
        if float(gains[pick]) < 1e-3 * float(left.square().sum()) or pick in chosen:
            break
        chosen.append(pick)
        best = _solve(matrix, r, tuple(chosen))
        left = r - matrix[:, chosen] @ torch.tensor(best.coefficients, dtype=matrix.dtype, device=matrix.device)
        if best.left <= max(noise, 1e-12 * total) * 0.05:
            break
    return None if best is None else _prune(matrix, r, best, noise)


def _projected(columns: Tensor, onto: Tensor) -> Tensor:
    q, _ = torch.linalg.qr(onto)
    return q @ (q.mT @ columns)


def _solve(matrix: Tensor, r: Tensor, chosen: tuple[int, ...]) -> _Solved:
    part = matrix[:, list(chosen)]
    norms = part.square().sum(0).sqrt()
    u, s, vh = torch.linalg.svd(part / norms, full_matrices=False)
    inverse = torch.where(s > 1e-13 * s[0], 1 / s, 0.0)
    coefficients = vh.mT @ (inverse * (u.mT @ r)) / norms
    left = float((r - part @ coefficients).square().sum())
    variance = left / max(len(r) - len(chosen), 1)
    errors = (variance * (vh.mT * inverse).square().sum(1)).sqrt() / norms
    condition = float(s[0] / s[-1]) if float(s[-1]) else float("inf")
    return _Solved(chosen, tuple(coefficients.tolist()), tuple(errors.tolist()), left, condition)


def _prune(matrix: Tensor, r: Tensor, solved: _Solved, noise: float) -> _Solved:
    while len(solved.chosen) > 1:
        without = [_solve(matrix, r, tuple(c for c in solved.chosen if c != j)) for j in solved.chosen]
        smaller = min(without, key=lambda s: s.left)
        if smaller.left > max(_ALIKE * solved.left, 0.05 * noise):
            return solved
        solved = smaller
    return solved


def _golden_coefficients(matrix: Tensor, g: Tensor, columns: list[_Column], tensor: str) -> dict[int, float]:
    """The golden's own coefficients if the columns give it exactly; otherwise only its coefficient for itself."""
    mine = [i for i, c in enumerate(columns) if c.term != tensor]
    own = {i: 1.0 for i, c in enumerate(columns) if c.term == tensor}
    if not mine:
        return own
    total = float(g.square().sum())
    solved = _select(matrix[:, mine], g, 1e-12 * total)
    if solved is None or solved.left > 1e-10 * total or solved.condition > CONDITION:
        return own
    whole = [float(round(c)) if abs(c - round(c)) < 1e-9 else c for c in solved.coefficients]
    return own | {mine[i]: c for i, c in zip(solved.chosen, whole, strict=True)}


# what the coefficients mean


def _fits(
    tensor: str, where: str, columns: list[_Column], matrix: Tensor, r: Tensor, solved: _Solved, own: dict[int, float],
    numbers: Mapping[str, float], noise: float,
) -> list[Fit]:  # fmt: skip
    total = float(r.square().sum())
    fits = []
    for place, j in enumerate(solved.chosen):
        column, coefficient = columns[j], solved.coefficients[place]
        error = solved.errors[place]
        rest = tuple(c for c in solved.chosen if c != j)
        without = _solve(matrix, r, rest).left if rest else total
        golden = own.get(j)
        reading, exact, named = _reading(coefficient, error, golden, numbers)
        also = (*column.also, *_alternatives(matrix, r, columns, solved, j, noise))
        fits.append(
            Fit(
                tensor, column.term, column.factor, reading, coefficient, error, exact, named, golden,
                gain=(without - solved.left) / total, r2=1 - solved.left / total, condition=solved.condition,
                also=tuple(dict.fromkeys(also))[:8], where=where,
            )
        )  # fmt: skip
    return sorted(fits, key=lambda f: -f.gain)


def _reading(
    coefficient: float, error: float, golden: float | None, numbers: Mapping[str, float]
) -> tuple[str, float | None, str]:
    """(reading, exact coefficient, its name); for a factor, the name of what multiplied the golden's term.

    A term whose coefficient in the golden is unknown is read as if that coefficient were 1, if this gives a plain
    reading (missing, repeated, flipped); otherwise it is an addend that should not be there.
    """
    unit = golden if golden else 1.0
    relative, tolerance = coefficient / unit, 4 * abs(error / unit) + _FLOOR * abs(coefficient / unit)
    for value, label in ((-1.0, "missing"), (-2.0, "sign_flipped"), (1.0, "repeated")):
        if abs(relative - value) <= tolerance:
            return label, value * unit, f"{value:g}"
    times, whole = name(1 + relative, tolerance, numbers), round(1 + relative)
    if golden is not None and whole > 1 and abs(1 + relative - whole) <= tolerance:
        label = times.name if times is not None and times.value == whole else str(whole)
        # ranks or blocks may each add it, and the case has no number for them
        return "repeated", (whole - 1) * unit, label
    if golden is not None:
        exact = None if times is None else (times.value - 1) * unit
        return "factor", exact, "" if times is None else times.name
    plain = name(coefficient, tolerance, numbers)
    return "added", None if plain is None else plain.value, "" if plain is None else plain.name


def _alternatives(
    matrix: Tensor, r: Tensor, columns: list[_Column], solved: _Solved, j: int, noise: float
) -> Iterable[str]:
    """Columns that would explain as much in this one's place."""
    rest = [c for c in solved.chosen if c != j]
    others = [i for i in range(matrix.shape[1]) if i not in solved.chosen]
    if not others:
        return []
    left, cols = r, matrix[:, others]
    if rest:
        left = r - _projected(r[:, None], matrix[:, rest])[:, 0]
        cols = cols - _projected(cols, matrix[:, rest])
    squares = cols.square().sum(0)
    usable = squares > 1e-16 * matrix[:, others].square().sum(0)
    explained = torch.where(usable, (left @ cols).square() / squares.clamp_min(1e-300), 0.0)
    remaining = float(left.square().sum()) - explained
    limit = max(_ALIKE * solved.left, 0.05 * noise)
    return [columns[others[i]].label for i in torch.nonzero(remaining <= limit).flatten().tolist()]


def _changed_factors(fits: list[Fit]) -> list[Fit]:
    """Reads a term that is missing with one factor and present with another as one wrong factor, new over old."""
    gone = [f for f in fits if f.reading == "missing"]
    merged: dict[int, Fit] = {}
    used: set[int] = set()
    for fit in gone:
        for other in fits:
            unit = 1.0 if fit.golden is None else fit.golden
            if other.golden is None and other.term == fit.term and other is not fit and id(other) not in used:
                if abs(other.coefficient - unit) <= 4 * (other.error + fit.error) + 1e-5 * abs(unit):
                    named = _quotient(other.factor, fit.factor)
                    gain, also = fit.gain + other.gain, tuple(dict.fromkeys((*fit.also, *other.also)))
                    merged[id(fit)] = replace(
                        fit,
                        reading="factor",
                        coefficient=other.coefficient,
                        exact=None,
                        named=named,
                        gain=gain,
                        also=also,
                    )
                    used.add(id(other))
                    break
    return [merged.get(id(f), f) for f in fits if id(f) not in used]


def _quotient(new: str, old: str) -> str:
    above, below = [] if new == "1" else _expanded(new), [] if old == "1" else _expanded(old)
    for factor in list(above):
        if factor in below:
            above.remove(factor)
            below.remove(factor)
    over, under = " * ".join(above) or "1", " * ".join(below)
    return over if not under else f"{over}/({under})" if len(below) > 1 else f"{over}/{under}"


def _expanded(product: str) -> list[str]:
    out = []
    for part in product.split(" * "):
        out += [part[:-2]] * 2 if part.endswith("^2") else [part]
    return out
