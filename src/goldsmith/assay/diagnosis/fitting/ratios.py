"""Recognises a candidate that is a constant times the golden: in the whole tensor, a segment, or every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..facts.evidence import Ratio
from ..facts.numbers import NamedNumber, name

_EXPLAINED = 1e-3  # share of the error's squares that may remain
_FLOOR = 1e-6  # relative; ratios are not measured more precisely
Segments = Mapping[str, tuple[int, int, int]]


def ratios(
    tensor: str,
    got: Tensor,
    golden: Tensor,
    *,
    bound: Tensor | None = None,
    segments: Segments | None = None,
    numbers: Mapping[str, float] | None = None,
    factors: Mapping[str, Tensor] | None = None,
) -> list[Ratio]:
    """Constant ratios of `got` to `golden` (float64), for the widest groups that have one; empty if both agree.

    bound     rounding bound of every element; without it 1e-6 of the element
    segments  name -> (axis, lo, hi)
    numbers   names for a ratio; factors: per-row tensors that may equal row-wise ratios
    """
    numbers = numbers or {}
    if got.shape != golden.shape or not golden.numel():
        return []
    allowed = _bound(golden, bound)
    whole = _constant(got, golden, allowed)
    if whole is not None:
        return [_ratio(tensor, "tensor", "", whole, numbers)]
    results = []
    for group, (axis, lo, hi) in (segments or {}).items():
        part = _constant(*(t.narrow(axis, lo, hi - lo) for t in (got, golden, allowed)))
        if part is not None:
            results.append(_ratio(tensor, "segment", group, part, numbers))
    return results or list(_rows(tensor, got, golden, allowed, numbers, factors or {}))


def alone(
    tensor: str, got: Tensor, golden: Tensor, bound: Tensor, others: Iterable[tuple[Tensor, Tensor, Tensor]],
    numbers: Mapping[str, float],
) -> list[Ratio]:  # fmt: skip
    """The ratio of a single-element tensor, if another result (got, golden, bound) has the same ratio."""
    mine = _constant(got, golden, _bound(golden, bound), least=1)
    for y, g, e in others if mine is not None else ():
        theirs = _constant(y, g, _bound(g, e))
        if mine is not None and theirs is not None and abs(mine[0] - theirs[0]) <= mine[1] + theirs[1]:
            return [_ratio(tensor, "tensor", "", theirs, numbers)]
    return []


def _bound(golden: Tensor, bound: Tensor | None) -> Tensor:
    floor = _FLOOR * golden.abs()
    return floor if bound is None else torch.where(torch.isfinite(bound), bound, floor)


def _constant(y: Tensor, g: Tensor, e: Tensor, *, least: int = 2) -> tuple[float, float, float] | None:
    """(ratio, its error, relative spread) if y = ratio * g and ratio != 1; otherwise None.

    Needs at least `least` nonzero elements: a single one is a constant times anything.
    """
    both = torch.isfinite(y) & torch.isfinite(g)
    if not bool(both.all()):  # NaN and infinities of the case itself, at the same places in both, say nothing
        if not bool((both | (y == g) | torch.isnan(y) & torch.isnan(g)).all()):
            return None
        y, g, e = y[both], g[both], e[both]
    if int((g.abs() > 4 * e).sum()) < least:
        return None
    norm = float(g.square().sum())
    wrong = float((y - g).square().sum())
    if wrong <= 4 * float(e.square().sum()):
        return None
    ratio = float((y * g).sum()) / norm
    rest = y - ratio * g
    left = float(rest.square().sum())
    if left > _EXPLAINED * wrong or bool((rest.abs() > 1.02 * (1 + abs(ratio)) * e + 1e-300).any()):
        return None
    count = y.numel()
    spread = (left / count) ** 0.5 / max((norm / count) ** 0.5 * abs(ratio), 1e-300)
    error = 4 * (left / max(count - 1, 1) / norm) ** 0.5 + _FLOOR * abs(ratio)
    return (0.0 if abs(ratio) <= error else ratio), error, spread


def _ratio(
    tensor: str, scope: str, group: str, part: tuple[float, float, float], numbers: Mapping[str, float]
) -> Ratio:
    ratio, error, spread = part
    named = name(ratio, error, numbers)
    value, label, also = (named.value, named.name, named.also) if named else (ratio, "", ())
    return Ratio(tensor, scope, group, value, spread, label, also)


def _rows(
    tensor: str, y: Tensor, g: Tensor, e: Tensor, numbers: Mapping[str, float], factors: Mapping[str, Tensor]
) -> Iterator[Ratio]:
    """Slices along one axis, or along all axes but the last, each with its own ratio."""
    views = [(f"axis {axis}", axis) for axis in range(g.dim())] if g.dim() > 1 else []
    for group, axis in views:
        rows = [t.movedim(axis, 0).flatten(1) for t in (y, g, e)]
        if rows[1].shape[1] < 3 or rows[1].shape[0] < 2:
            continue
        parts = [_constant(*(t[i] for t in rows)) for i in range(rows[1].shape[0])]
        wrong = [bool(((rows[0][i] - rows[1][i]).abs() > 1.02 * rows[2][i]).any()) for i in range(len(parts))]
        fitted = {i: p for i, p in enumerate(parts) if p is not None}
        if not fitted or len(fitted) < sum(wrong):
            continue
        values = sorted(p[0] for p in fitted.values())
        middle = values[len(values) // 2]
        errors = max(p[1] for p in fitted.values())
        spread = max(p[2] for p in fitted.values())
        share = len(fitted) / len(parts)
        if values[-1] - values[0] <= 2 * errors + 1e-9:
            named = name(middle, errors, numbers)
        else:
            named = _row_factor(fitted, len(parts), factors)
        group = f"{group} {_ranges(sorted(fitted))}" if share < 1 else group
        naming = (named.name, named.also) if named else ("", ())
        yield Ratio(tensor, "row", group, middle, spread, naming[0], naming[1], share)


def _row_factor(
    fitted: Mapping[int, tuple[float, float, float]], count: int, factors: Mapping[str, Tensor]
) -> NamedNumber | None:
    """The factor whose elements, or their reciprocals, equal the rows' ratios."""
    fits = []
    index = sorted(fitted)
    values = torch.tensor([fitted[i][0] for i in index], dtype=torch.float64)
    errors = torch.tensor([fitted[i][1] for i in index], dtype=torch.float64)
    for factor, tensor in factors.items():
        if tensor.numel() != count:
            continue
        rows = tensor.double().flatten()[index].cpu()
        for label, wanted in ((factor, rows), (f"1/{factor}", 1 / rows), (f"{factor}^2", rows.square())):
            if bool(((values - wanted).abs() <= errors + 1e-5 * wanted.abs()).all()):
                fits.append(label)
    return NamedNumber(float(values.median()), fits[0], tuple(fits[1:])) if fits else None


def _ranges(index: list[int]) -> str:
    spans: list[list[int]] = []
    for i in index:
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return "[" + ", ".join(str(lo) if lo == hi else f"{lo}..{hi}" for lo, hi in spans[:6]) + "]"
