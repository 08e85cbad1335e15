"""Where a golden's gradient is one of several: at ties of a maximum, at the kink of a gate, among equals in a sort.

The golden's gradient is taken again at inputs that are nudged, each element in a direction of its own: by a hair, which
parts what ties and moves nothing that is smooth; and by some roundings, there and back, which shuts a gate that the
rounding of a sum may shut, while what is smooth goes as far back as it went there. Where the gradient jumps, another
convention (the first of two equal elements, the last, both by halves; a gate open or shut) gives another one, as legal.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bounds.running_errors import Bounded, unit_roundoff
from ..support import deadline

TIES, NEAR = 16, 16  # nudges of either kind
NUDGES = TIES + NEAR
LEAST = 2  # of either kind, whatever the time: one pair of them, there and back
LEFT_OUT = "most looks at ties and kinks: where the golden's gradient jumps, whatever lies about there was taken"
HAIR = 2.0**-40  # relative: leaves the eight thousand steps of float64 that part what ties
ROUNDINGS = 64  # as far as sums of some thousand terms are off
JUMP = 0.5  # times the error that roundings make: of what is smooth next to nothing is left in a jump
OPEN_JUMP = 2.0**-20  # of the largest gradient, where nothing is known of that error
LEAST_JUMP = 2.0**-26  # of the largest gradient: a hair moves what is smooth by less, at a condition of 10^4 as well
# Kinks that are added up (a gradient behind many gates) fall together by chance in none of the nudges: of k such the
# nudges span some sqrt(k), and one convention for all of them k. So what is allowed is wider than what was seen.
WIDER = 4.0
_PART = 2**15  # elements at a time
ALONE = 1 / 16  # of what was seen: nudges that give either end, or the golden's own, and nothing between, are one kink


@dataclass(frozen=True)
class Swing:
    """The least and the greatest gradient that the nudges gave.

    jump: the part that is not smooth; several: where kinks are added up; values: of the input whose gradient it is.
    """

    golden: Tensor
    low: Tensor
    high: Tensor
    jump: Tensor
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
                torch.where(known, apart / error, 0.0).square().reshape(len(members), -1).sum(1)
                / known.sum().clamp(min=1)
            ).sqrt()
            usual = apart.amax(0) + unit_roundoff(store) * self.golden.abs()
            error = torch.minimum(error, usual + torch.where(known, noise.amax() * error, 0.0))
        largest = torch.maximum(self.low.abs(), self.high.abs()).amax()
        limit = torch.where(torch.isfinite(error), JUMP * error, OPEN_JUMP * largest)
        on = self.jump > limit.clamp(min=LEAST_JUMP * largest)
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


class Swings:
    """How far every gradient of a golden swings; worked out for one of them when it is asked for.

    gradients(leaves) gives them by name; `inputs` are the leaves that are nudged. Where there is no time for all nudges
    two pairs of either kind are made: they show whether a gradient jumps, and less well how far.
    """

    def __init__(
        self,
        gradients: Callable[[dict[str, Tensor]], dict[str, Tensor]],
        leaves: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        golden: Mapping[str, Tensor],
        unit: float,
    ):
        self.golden, self.inputs = golden, inputs
        self._parted: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # nudged by a hair, there and back
        self._bent: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # by some roundings
        self._known: dict[str, Swing] = {}
        moving = {n: t for n, t in inputs.items() if t.is_floating_point() and not _mask(t)}

        def run(number: int) -> dict[str, Tensor]:
            far = HAIR if number < TIES else ROUNDINGS * unit
            found = gradients({**leaves, **{n: nudged(t, n, number, far) for n, t in moving.items()}})
            return {n: t for n, t in found.items() if n.endswith(".grad") and n in golden}

        slowest = 0.0
        for number in range(0, TIES, 2):
            left = NUDGES - 2 * number
            if number >= LEAST and deadline.lacks(slowest * left, LEFT_OUT):
                break
            for kind, first in ((self._parted, number), (self._bent, TIES + number)):
                began = time.perf_counter()
                kind.append((run(first), run(first + 1)))
                slowest = max(slowest, (time.perf_counter() - began) / 2)

    @property
    def partial(self) -> bool:
        return 4 * len(self._bent) < NUDGES

    def get(self, name: str) -> Swing | None:
        """Of one gradient; None of any other result."""
        pairs = [*self._parted, *self._bent]
        if not name.endswith(".grad") or name not in self.golden or any(name not in r for pair in pairs for r in pair):
            return None
        if name not in self._known:
            value = self.golden[name]
            runs = [value, *(r[name] for pair in pairs for r in pair)]
            flat = [r.reshape(-1) for r in runs]
            parts = [self._part(list(of)) for of in zip(*(t.split(_PART) for t in flat), strict=True)]
            low, high, jump, several = (torch.cat(of).reshape(value.shape) for of in zip(*parts, strict=True))
            of = self.inputs.get(name.removesuffix(".grad"))
            self._known[name] = Swing(value, low, high, jump, several | self.partial, of)
        return self._known[name]

    def _part(self, runs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Least, greatest, jump, and whether kinks are added up, of some elements (so many as a cache holds)."""
        seen, value, count = torch.stack(runs), runs[0], len(self._parted)
        parted, there, back = seen[: 2 * count + 1], seen[1::2], seen[2::2]
        both = there + back - value  # gates that open under one nudge, and those that open under its opposite
        bent = (both - value)[count:].abs().amax(0)
        low, high = (torch.minimum(seen.amin(0), both.amin(0)), torch.maximum(seen.amax(0), both.amax(0)))
        jump = torch.maximum(parted.amax(0) - parted.amin(0), bent)
        nearest = torch.minimum((seen - low).abs(), (seen - high).abs())
        nearest = torch.minimum(nearest, (seen - value).abs())
        return low, high, jump, (nearest > ALONE * (high - low)).any(0)


def binary(t: Tensor) -> bool:
    """Whether a floating input holds zeros and ones alone: a mask, a choice. Other numbers are none of its values."""
    return t.is_floating_point() and t.numel() > 0 and bool(((t == 0) | (t == 1)).all())


def _mask(t: Tensor) -> bool:
    """A binary one that has both: what is 0 everywhere may be an ordinary number, repeated, and lie on a kink."""
    return binary(t) and bool((t != t.flatten()[0]).any())


def nudged(t: Tensor, name: str, number: int, unit: float) -> Tensor:
    """t (1 + s unit) with s in [-1, 1]: rising along memory, falling, then at random, each beside its opposite.

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
