"""Fits the unknown number of a change, and names the number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..edits.golden_edit import NamedEdit
from ..facts.evidence import WhatIf
from ..facts.numbers import name
from .changed_golden import ChangedGolden
from .judge import EXPLAINED, Judge
from .witness import few

_STEPS = 14
_HALVED = 3

Make = Callable[[float], Tensor | None]


def sought(search: ChangedGolden, change: NamedEdit) -> WhatIf | None:
    """The change with its best number; a factor is fitted by its logarithm."""
    if change.free is None:
        return None
    factor = change.free == 1.0

    def at(t: float) -> Tensor | None:
        value = search.value(replace(change, edit=change.edit.with_number(math.exp(t) if factor else t)))
        return value if value is not None and value.shape == search.judge.got.shape else None

    begin = 0.0 if factor else change.free
    best = fitting(at, search.judge, begin, 3.0 if factor else math.inf)
    if best is None or best.share < EXPLAINED or best.at == begin:
        return None
    number = math.exp(best.at) if factor else best.at
    fitted = replace(change, edit=change.edit.with_number(number), free=None)
    confirmed = not few(search.judge) or search.explains_other_draws(fitted)
    return _number(search, change, number, best.share, best.exact) if confirmed else None


def _number(search: ChangedGolden, change: NamedEdit, number: float, share: float, exact: bool) -> WhatIf | None:
    """The meaning of the best number."""
    if change.free == 1.0 and not 1e-4 < number < 1e6:
        return None  # 0 or 1, a missing or an unchanged term: another change covers it
    label = name(number, 1e-3 * min(abs(number), abs(number - 1)), search.numbers) if change.free == 1.0 else None
    called = label.name if label is not None else ""
    cause, prior = change.cause, change.prior - 0.1
    if change.free == 1.0:
        near = abs(number - 1) < 2.0**-5 and not any(n in called for n in search.numbers)
        cause = "scale_bias" if near else cause
        prior -= 0.2 * near
        if cause == "repeated_term" and abs(number - round(number)) > 1e-3:
            cause = "wrong_factor"
    text = f"{change.text} {number:.6g}" + (f" = {called}" if called and called != f"{number:g}" else "")
    params = {**change.params, "value": number, "named": called}
    return WhatIf(cause, text, search.tensor, share, exact, params, prior=prior, also=change.also)


@dataclass(frozen=True)
class Best:
    """The best number, the share of the squared error it explains, and whether nothing is left beyond rounding."""

    at: float
    share: float
    exact: bool


def fitting(make: Make, judge: Judge, begin: float, farthest: float) -> Best | None:
    """Gauss-Newton from `begin`, in steps of at most `farthest`; a step that does not help is halved."""
    t, step, halved = begin, 0.0, 0
    best: Best | None = None
    for _ in range(_STEPS):
        value = make(t)
        share, exact = judge.explained(value)
        if value is None or (best is not None and share <= best.share):
            if best is None or halved > _HALVED or best.exact:
                break
            halved, step = halved + 1, step / 2
            t = best.at + step
            continue
        best = Best(t, share, exact)
        step = _step(make, judge, t, value)
        if abs(step) < 1e-9 * max(abs(t), 1e-9) or not abs(step) < 1e9:
            break
        step = max(-farthest, min(farthest, step))
        t += step
    return best


def _step(make: Make, judge: Judge, t: float, value: Tensor) -> float:
    small = 1e-5 * max(1.0, abs(t)) if t else 1e-7
    further = make(t + small)
    if further is None:
        return 0.0
    left = judge.residual(value)
    slope = (further - value).flatten() / small / judge.bound.flatten()
    good = torch.isfinite(slope) & torch.isfinite(left)
    slope, left = slope[good], left[good]
    size = float(slope.square().sum())
    return float((slope * left).sum()) / size if size else 0.0
