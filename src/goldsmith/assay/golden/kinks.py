"""Elements where several gradients are legal: at ties of a maximum, at the kink of a gate, among equals in a sort.

The golden's gradient is recomputed at nudged inputs, each element in its own direction. Tiny nudges separate ties and
leave smooth gradients alone. Nudges of some roundings, in both directions, close a gate that the rounding of a sum may
close; a smooth gradient changes by opposite amounts. Where the gradient jumps, another convention is as legal: the
first of two equal elements, the last, half to each; a gate open or closed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bounds.bounded import Bounded, unit_roundoff
from ..support import deadline

TIES, NEAR = 16, 16  # number of nudges of each kind
NUDGES = TIES + NEAR
LEAST = 2  # of each kind, even without time: one pair in opposite directions
LEFT_OUT = (
    "most tests of ties and kinks, so any gradient near the legal ones was accepted where the golden's gradient jumps"
)
HAIR = 2.0**-40  # relative: 8,000 steps of float64, enough to separate ties
ROUNDINGS = 64  # the error of sums of some thousand terms
JUMP = 0.5  # times the rounding error: a smooth gradient contributes almost nothing to a jump
OPEN_JUMP = 2.0**-20  # of the largest gradient, where that error is unknown
LEAST_JUMP = 2.0**-26  # of the largest gradient: a HAIR moves a smooth one by less, even at a condition of 10^4
# A gradient behind many gates sums k kinks. Random nudges span about sqrt(k) of them, one convention for all spans k,
# so the allowed range is wider than the observed one.
WIDER = 4.0
_PART = 2**15  # elements at a time
ALONE = 1 / 16  # of the observed range: if every nudge gives either end or the golden's value, it is a single kink


@dataclass(frozen=True)
class Swing:
    """The range of one gradient over all nudges.

    low, high: least and greatest value; jump: the part that is not smooth; several: mask of sums of several kinks;
    values: the input whose gradient it is.
    """

    golden: Tensor
    low: Tensor
    high: Tensor
    jump: Tensor
    several: Tensor
    values: Tensor | None

    def kink(self, bounded: Bounded, store: torch.dtype, members: list[Tensor]) -> Tensor:
        """Mask of the elements that lie on a kink.

        Of many tied elements the nudges pick a few, so every element equal to one of those, or to its negative, counts.
        """
        if not self.golden.numel():
            return torch.zeros_like(self.golden, dtype=torch.bool)
        error = bounded.bound
        if members:  # the bound is itself wide where the analysis has seen the kink
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
        """Mask of the wrong elements of y that another convention explains."""
        on = self.kink(bounded, store, members)
        if not bool(on.any()):
            return on
        crowd = on & self._crowded(on)
        low, high = self.low, self.high
        if bool(crowd.any()):  # nudges show only part of how a crowd shares: allow the range of its lines
            low = torch.where(crowd, _over_lines(torch.where(on, low, torch.inf), torch.amin, torch.minimum), low)
            high = torch.where(crowd, _over_lines(torch.where(on, high, -torch.inf), torch.amax, torch.maximum), high)
        room = torch.where(crowd | self.several, WIDER, ALONE) * (high - low)
        return on & (y >= low - room) & (y <= high + room) & (y != self.golden)

    def _crowded(self, on: Tensor) -> Tensor:
        """Mask of the elements whose value, or its negative, more than two elements on a kink share."""
        if self.values is None or self.values.shape != on.shape:
            return torch.zeros_like(on)
        _, group, number = self.values.abs()[on].unique(return_inverse=True, return_counts=True)
        out = torch.zeros_like(on)
        out[on] = number[group] > 2
        return out


def _over_lines(t: Tensor, reduce: Callable[..., Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The extreme over all axis-aligned lines through each element."""
    out = t
    for axis in range(t.dim()):
        out = join(out, reduce(t, axis, keepdim=True).expand_as(t))
    return out


class Swings:
    """The Swing of every gradient of a golden, each computed on first use.

    gradients(leaves) returns them by name; `inputs` are the leaves to nudge. Without time for all nudges there are
    fewer pairs of each kind: they show whether a gradient jumps, and less well how far.
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
        self._parted: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # nudged by HAIR in opposite directions
        self._bent: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # nudged by ROUNDINGS
        self._known: dict[str, Swing] = {}
        moving = {n: t for n, t in inputs.items() if t.is_floating_point() and not _mask(t)}

        def run(number: int) -> dict[str, Tensor]:
            far = HAIR if number < TIES else ROUNDINGS * unit
            results = gradients({**leaves, **{n: nudged(t, n, number, far) for n, t in moving.items()}})
            return {n: t for n, t in results.items() if n.endswith(".grad") and n in golden}

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
        """The Swing of one gradient; None for any other result."""
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
        """(low, high, jump, several) of one chunk of elements, small enough for the cache."""
        seen, value, count = torch.stack(runs), runs[0], len(self._parted)
        parted, there, back = seen[: 2 * count + 1], seen[1::2], seen[2::2]
        both = there + back - value  # gates that open under a nudge, and those that open under its opposite
        bent = (both - value)[count:].abs().amax(0)
        low, high = (torch.minimum(seen.amin(0), both.amin(0)), torch.maximum(seen.amax(0), both.amax(0)))
        jump = torch.maximum(parted.amax(0) - parted.amin(0), bent)
        nearest = torch.minimum((seen - low).abs(), (seen - high).abs())
        nearest = torch.minimum(nearest, (seen - value).abs())
        return low, high, jump, (nearest > ALONE * (high - low)).any(0)


def binary(t: Tensor) -> bool:
    """Whether a floating-point input holds only zeros and ones, as a mask or a choice does."""
    return t.is_floating_point() and t.numel() > 0 and bool(((t == 0) | (t == 1)).all())


def _mask(t: Tensor) -> bool:
    """Whether t is binary and has both values: constant zeros may be ordinary numbers that lie on a kink."""
    return binary(t) and bool((t != t.flatten()[0]).any())


def nudged(t: Tensor, name: str, number: int, unit: float) -> Tensor:
    """t (1 + s unit), s in [-1, 1]: falling along memory, rising, then random, each followed by its opposite.

    Under rising nudges the first of equal elements becomes the smallest, under falling ones the largest.
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
