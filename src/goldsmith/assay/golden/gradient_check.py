"""The golden's gradient against central differences, along random directions and away from kinks and ties.

The derivative of L(t) = sum_j <c_j, y_j(x + t d)> at 0 is compared with <gradient, d> for random directions d:

    D(h) = (L(h) - L(-h)) / 2h,   R = (4 D(h/2) - D(h)) / 3 = L'(0) + O(h^4),   h = eps^(1/3)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from .self_check_results import Forward, SelfCheck

_STEP = torch.finfo(torch.float64).eps ** (1 / 3)
_RELATIVE = 1e-6
_TIE_DISTANCE, _TIE_POINTS = (
    1e-3,
    3,
)  # distance (in rms) and number of the points next to a tie at which the gradient is checked


def confirm(
    check: SelfCheck,
    forward: Forward,
    backward: Forward,
    grads: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    generator: torch.Generator,
    surrogate: Collection[str] = (),
    directions: int = 2,
) -> None:
    """Adds problems and notes to `check`: wrong shapes of gradients, and derivatives that differences contradict.

    forward, backward: as in golden.self_check, as functions of the leaves; grads: result of backward(leaves).
    surrogate: names of gradients that are not derivatives, such as those of a straight-through estimator.
    """
    names = [name for name in grads if name in leaves and leaves[name].is_floating_point() and leaves[name].numel()]
    for name in names:
        if grads[name].shape != leaves[name].shape:
            actual, expected = list(grads[name].shape), list(leaves[name].shape)
            check.problems.append(f"the gradient of {name} has shape {actual}, the input {expected}")
            return
    declared = [name for name in names if name in surrogate]
    if declared:
        check.notes.append(
            f"declared as surrogate, not compared with differences: the gradient of {', '.join(declared)}"
        )
    names = [name for name in names if name not in surrogate]
    for _ in range(directions if names else 0):
        line = _Line(forward, cotangents, leaves, _direction(leaves, names, generator))
        if not _confirms(line, grads):
            others = [line.along(_direction(leaves, names, generator)) for _ in range(2)]
            _explain(check, line, others, grads, backward)
            return


def _direction(leaves: Mapping[str, Tensor], names: Sequence[str], generator: torch.Generator) -> dict[str, Tensor]:
    """A random direction, each input in proportion to its own rms."""
    out = {}
    for name in names:
        draw = torch.randn(leaves[name].shape, generator=generator, dtype=torch.float64)
        out[name] = draw.to(leaves[name].device, non_blocking=leaves[name].is_cuda) * _scale(leaves[name])
    return out


def _scale(t: Tensor) -> float:
    scale = float(t.double().square().mean().sqrt())
    return scale if scale > 0 and scale < float("inf") else 1.0


class _Line:
    """L(x + t d) as a cached function of t; `noise` is the rounding error of a difference of two values."""

    def __init__(
        self,
        forward: Forward,
        cotangents: Mapping[str, Tensor],
        leaves: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
    ) -> None:
        self._forward, self._cotangents = forward, cotangents
        self.leaves, self.direction = leaves, direction
        self._known: dict[float, float] = {}
        self.noise = 0.0

    def __call__(self, t: float) -> float:
        if t not in self._known:
            moved = {
                name: x + t * self.direction[name] if name in self.direction else x.clone()
                for name, x in self.leaves.items()
            }
            with torch.no_grad():
                results = self._forward(moved)
            terms = [results[name.removeprefix("grad_")] * c for name, c in self._cotangents.items()]
            self._known[t] = sum(float(term.sum()) for term in terms)
            size = sum(float(term.abs().sum()) for term in terms)
            self.noise = max(self.noise, 8 * torch.finfo(torch.float64).eps * size)
        return self._known[t]

    def along(self, direction: dict[str, Tensor]) -> _Line:
        """The same function along another direction."""
        return _Line(self._forward, self._cotangents, self.leaves, direction)

    def at(self, leaves: dict[str, Tensor]) -> _Line:
        """The same direction through another point."""
        return _Line(self._forward, self._cotangents, leaves, self.direction)

    def predicted(self, grads: Mapping[str, Tensor]) -> tuple[float, float]:
        """<gradient, d>, and its typical size if the terms have random signs."""
        products = [grads[name] * d for name, d in self.direction.items()]
        return sum(float(p.sum()) for p in products), sum(float(p.square().sum()) for p in products) ** 0.5

    def slope(self, h: float) -> float:
        return (self(h) - self(-h)) / (2 * h)

    def richardson(self, h: float) -> float:
        return (4 * self.slope(h / 2) - self.slope(h)) / 3

    def bends(self, h: float) -> bool:
        """Whether one-sided slopes differ as much at h / 8 as at h: a kink. A smooth function has an eighth of it."""
        wide, narrow = (abs(self(s) - 2 * self(0.0) + self(-s)) / s for s in (h, h / 8))
        return narrow > 0.5 * wide and narrow > 16 * self.noise / h


def _confirms(line: _Line, grads: Mapping[str, Tensor]) -> bool:
    """Whether the gradient agrees at some step: the usual one, or a smaller one if a kink lies within the usual one."""
    predicted, size = line.predicted(grads)
    for h in (_STEP, _STEP / 64, _STEP / 1024):
        measured = line.richardson(h)
        tolerance = _RELATIVE * max(size, abs(predicted)) + 3 * line.noise / h
        if abs(measured - predicted) <= tolerance:
            return True
    return False


def _right_nearby(line: _Line, grads: Mapping[str, Tensor], backward: Forward) -> bool | None:
    """Whether the gradient is right at points near the inputs, away from ties; None if none of them is smooth."""
    smooth = False
    generator = torch.Generator().manual_seed(_TIE_POINTS)
    for _ in range(_TIE_POINTS):
        away = _direction(line.leaves, list(line.direction), generator)
        moved = {n: t + _TIE_DISTANCE * away[n] if n in away else t.clone() for n, t in line.leaves.items()}
        there = line.at(moved)
        if _confirms(there, backward(moved)):
            return True
        smooth = smooth or not there.bends(_STEP / 16)
    return False if smooth else None


def _explain(
    check: SelfCheck, line: _Line, others: list[_Line], grads: Mapping[str, Tensor], backward: Forward
) -> None:
    """Adds a note for a kink, a tie or an unsmooth function at the point; otherwise the problem "wrong gradient".

    others: further directions, because the two sides of a kink may agree along one by chance.
    """
    (predicted, size), measured = line.predicted(grads), line.richardson(_STEP)
    if not all(abs(v) < float("inf") for v in (measured, predicted)):
        check.notes.append("the golden's gradient is not confirmed: NaN or Inf along the way")
        return
    right_nearby = _right_nearby(line, grads, backward)
    for bent in (o for o in (line, *others) if right_nearby is not False and o.bends(_STEP / 16)):
        h = _STEP / 128
        left, right = (bent(0.0) - bent(-h)) / h, (bent(h) - bent(0.0)) / h
        check.notes.append(f"a kink: the golden's slope is {left:.6g} on one side and {right:.6g} on the other")
        return
    if abs(line.richardson(_STEP / 4) - measured) > 1e-2 * abs(measured - predicted) + _RELATIVE * size:
        check.notes.append("the golden's gradient is not confirmed: differences at two step sizes disagree")
        return
    if right_nearby:
        text = f"a tie: the golden's slope is {predicted:.6g}, differences give {measured:.6g}; beside it they agree"
        check.notes.append(text)
        return
    bad = {name: line.along({name: d}) for name, d in line.direction.items()}
    bad = {name: own for name, own in bad.items() if not _confirms(own, grads)}
    wrong = [
        f"{n} (backward {o.predicted(grads)[0]:.9g}, differences {o.richardson(_STEP):.9g})" for n, o in bad.items()
    ]
    which = ", ".join(wrong) or f"all inputs together (backward {predicted:.9g}, differences {measured:.9g})"
    check.problems.append(
        f"the golden's gradient disagrees with central differences along a random direction: {which}; if it is not "
        f"meant to be a derivative (straight-through), declare surrogate={tuple(bad) or tuple(line.direction)!r}"
    )
