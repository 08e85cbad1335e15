"""Recognises a candidate that is a constant times the golden, in the whole tensor or in a segment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .evidence import Ratio
from .numbers import name

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
) -> list[Ratio]:
    """Constant ratios of `got` to `golden` (float64), for the widest groups that have one; empty if both agree.

    bound     rounding bound of every element; without it 1e-6 of the element
    segments  name -> (axis, lo, hi)
    numbers   names for a ratio
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
    return results


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
