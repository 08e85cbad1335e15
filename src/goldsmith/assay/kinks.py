"""Where a golden's gradient is one of several: at ties of a maximum, at the kink of a gate, among equals in a sort.

The golden's gradient is taken again at inputs that are nudged by less than they are rounded, each element in a
direction of its own. Where it jumps, the point lies on a kink, and another convention (the first of two equal elements,
the last, both by halves; a gate open or shut) gives another gradient, as legal. What is smooth there hardly moves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .bounds import Bounded, unit_roundoff

NUDGES = 16
JUMP = 16.0  # times the error that roundings make: farther than such nudges move what is smooth
OPEN_JUMP = 2.0**-6  # of the largest gradient, where nothing is known of that error
# Kinks that are added up (a gradient behind many gates) fall together by chance in none of the nudges: of k such the
# nudges span some sqrt(k), and one convention for all of them k. So what is allowed is wider than what was seen.
WIDER = 4.0
ALONE = 1 / 16  # of what was seen: nudges that give either end, or the golden's own, and nothing between, are one kink


@dataclass(frozen=True)
class Swing:
    """The least and the greatest gradient that the nudges gave.

    several: where kinks are added up; values: of the input that it is the gradient of.
    """

    golden: Tensor
    low: Tensor
    high: Tensor
    several: Tensor
    values: Tensor | None

    def kink(self, bounded: Bounded, store: torch.dtype, members: list[Tensor]) -> Tensor:
        """The elements that lie on a kink.

        Of many that tie the nudges choose a few: all that equal one of those, or its negative, count with it.
        """
        if not self.golden.numel():
            return torch.zeros_like(self.golden, dtype=torch.bool)
        error = bounded.bound
        if members:  # the bound itself is wide where the analysis has seen the kink
            apart = torch.stack([(m.double() - self.golden).abs() for m in members])
            known = torch.isfinite(error) & (error > 0)
            noise = (
                torch.where(known, apart / error, 0.0).square().flatten(1).sum(1) / known.sum().clamp(min=1)
            ).sqrt()
            usual = apart.amax(0) + unit_roundoff(store) * self.golden.abs()
            error = torch.minimum(error, usual + torch.where(known, noise.amax() * error, 0.0))
        unknown = OPEN_JUMP * torch.maximum(self.low.abs(), self.high.abs()).amax()
        on = self.high - self.low > torch.where(torch.isfinite(error), JUMP * error, unknown)
        if self.values is not None and self.values.shape == on.shape and bool(on.any()):
            on = on | torch.isin(self.values.abs(), self.values.abs()[on])
        return on

    def excuses(self, y: Tensor, bounded: Bounded, store: torch.dtype, members: list[Tensor]) -> Tensor:
        """The elements of y that are off, and that another convention explains."""
        on = self.kink(bounded, store, members)
        if not bool(on.any()):
            return on
        crowd = on & self._crowded(on)
        low, high = self.low, self.high
        if bool(crowd.any()):  # who gets what among many has not been seen whole: what any of its lines gets
            low = torch.where(crowd, _over_lines(torch.where(on, low, torch.inf), torch.amin, torch.minimum), low)
            high = torch.where(crowd, _over_lines(torch.where(on, high, -torch.inf), torch.amax, torch.maximum), high)
        room = torch.where(crowd | self.several, WIDER, ALONE) * (high - low)
        return on & (y >= low - room) & (y <= high + room) & (y != self.golden)

    def _crowded(self, on: Tensor) -> Tensor:
        """More than two of the elements on a kink share this one's value, or its negative."""
        if self.values is None or self.values.shape != on.shape:
            return torch.zeros_like(on)
        _, group, number = self.values.abs()[on].unique(return_inverse=True, return_counts=True)
        out = torch.zeros_like(on)
        out[on] = number[group] > 2
        return out


def _over_lines(t: Tensor, reduce: Callable[..., Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The extreme over all lines along an axis that an element lies on."""
    out = t
    for axis in range(t.dim()):
        out = join(out, reduce(t, axis, keepdim=True).expand_as(t))
    return out


def swings(
    gradients: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    leaves: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    golden: Mapping[str, Tensor],
    unit: float,
) -> dict[str, Swing]:
    """How far every gradient swings. gradients(leaves) gives them by name; `inputs` are the leaves that are nudged."""
    runs = []
    for number in range(NUDGES):
        moved = {n: nudged(t, n, number, unit) for n, t in inputs.items() if t.is_floating_point()}
        runs.append(gradients({**leaves, **moved}))
    found = {}
    for name, value in golden.items():
        if name.endswith(".grad") and all(name in run for run in runs):
            seen = torch.stack([value, *(run[name] for run in runs)])
            low, high = seen.amin(0), seen.amax(0)
            nearest = torch.stack([(seen - end).abs() for end in (low, high, value)]).amin(0)
            several = (nearest > ALONE * (high - low)).any(0)
            found[name] = Swing(value, low, high, several, inputs.get(name.removesuffix(".grad")))
    return found


def nudged(t: Tensor, name: str, number: int, unit: float) -> Tensor:
    """t (1 + s u) with s in [-1, 1]: rising along memory, falling, then at random, each beside its opposite.

    The first of equal elements is the smallest of them under the rising one, and the largest under the falling one.
    """
    if number < 2:
        s = torch.linspace(-1.0, 1.0, t.numel(), dtype=t.dtype).reshape(t.shape)
    else:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{number // 2}".encode()))
        s = torch.rand(t.shape, generator=generator, dtype=t.dtype) * 2 - 1
    s = (s if number % 2 else -s).to(t.device)
    nonzero = t[t != 0].abs()
    least = float(nonzero.amin()) if nonzero.numel() else 1.0
    return t + torch.where(t == 0, s * least, t.abs() * s) * unit
