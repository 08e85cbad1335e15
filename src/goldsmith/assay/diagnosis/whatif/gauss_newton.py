"""Gauss-Newton fit of a change's free number to the candidate's values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .judge import Judge

_STEPS = 14
_HALVED = 3

Make = Callable[[float], Tensor | None]


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
