"""Costs: the seconds that a machine takes to move and to compute experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import numpy as np

_RATES = (
    "cpu_bytes_per_s", "cpu_flops", "link_bytes_per_s", "dram_bytes_per_s", "device_bytes_per_s", "device_flops",
    "link_beside_bytes_per_s",
)  # fmt: skip
_CURVES = ("cpu_curve", "cpu_beside_curve", "device_curve")
_OP = "offload.Costs"
_FAR = 1e12  # tokens: the last piece of a curve is extended to here

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """An expert of S = expert_bytes bytes takes t(n) seconds for n tokens of f = flops_per_token operations each:

        t(n) = max(S / bytes_per_s, n f / flops)     without a curve
        t(n) = linear interpolation of the curve     with one: constant before its first point, the last piece extended
                                                     beyond its last point

    cpu_bytes_per_s, cpu_flops        the CPU's kernel with all its threads: weights read, work done
    link_bytes_per_s                  a copy of one expert to the device
    dram_bytes_per_s                  the CPU's kernel and copies together, which read the same memory
    device_bytes_per_s, device_flops  the device's kernel
    cpu_latency, link_latency, device_latency    time of a call in addition to its experts, if that lane is the slowest
    split_latency    the least time of a call with experts both on the CPU and on the device
    shared           the device is the CPU itself (device="cpu"): its experts run after the CPU's, not at the same time
    cpu_curve, device_curve    measured points (n, seconds); (): use the rates
    cpu_beside_curve           the CPU's curve while copies run; link_beside_bytes_per_s: a copy's rate while the CPU
                               computes. () and None: neither slows the other down, except for dram_bytes_per_s

    Rates are above 0 and may be infinite; other numbers are at least 0. A curve's n increase and its seconds do not
    decrease. Nothing is faster at the same time as something else than alone. Raises ValueError or TypeError otherwise.
    """

    expert_bytes: float
    flops_per_token: float
    cpu_bytes_per_s: float
    cpu_flops: float
    link_bytes_per_s: float
    dram_bytes_per_s: float
    device_bytes_per_s: float
    device_flops: float
    cpu_latency: float
    link_latency: float
    device_latency: float
    split_latency: float = 0.0
    shared: bool = False
    cpu_curve: Curve = ()
    cpu_beside_curve: Curve = ()
    device_curve: Curve = ()
    link_beside_bytes_per_s: float | None = None
    _hash: ClassVar[int]

    def __hash__(self) -> int:
        return self._hash  # every lookup of a plan hashes the costs

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "shared":
                if not isinstance(value, bool):
                    raise TypeError(f"{_OP}: shared={value!r}, expected True or False")
            elif name in _CURVES:
                object.__setattr__(self, name, _curve(name, value))
            elif value is not None or name != "link_beside_bytes_per_s":
                _check_number(name, value)
        self._check_beside()
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def _check_beside(self) -> None:
        if (self.link_beside_bytes_per_s or 0.0) > self.link_bytes_per_s:
            raise ValueError(
                f"{_OP}: link_beside_bytes_per_s={self.link_beside_bytes_per_s!r} is above link_bytes_per_s="
                f"{self.link_bytes_per_s!r}: a copy cannot be faster while the CPU computes"
            )
        if not self.cpu_beside_curve:
            return
        if not self.cpu_curve:
            raise ValueError(f"{_OP}: cpu_beside_curve needs cpu_curve for comparison")
        for n in sorted({n for n, _ in (*self.cpu_curve, *self.cpu_beside_curve)}):
            beside, alone = np.interp(n, *self.cpu_beside), np.interp(n, *self.cpu)
            if beside < alone * (1 - 1e-12):
                raise ValueError(
                    f"{_OP}: cpu_beside_curve has {beside} s for {n:g} tokens, less than the {alone} s of cpu_curve: "
                    "the CPU cannot be faster while copies run"
                )

    @cached_property
    def cpu(self) -> tuple[np.ndarray, np.ndarray]:
        """The breakpoints of the CPU's t(n) and t there: `numpy.interp(tokens, *costs.cpu)` is t."""
        return _breakpoints(self.cpu_curve, *self._roof("cpu"))

    @cached_property
    def cpu_beside(self) -> tuple[np.ndarray, np.ndarray]:
        """The breakpoints of the CPU's curve while copies run."""
        n, seconds = _breakpoints(self.cpu_beside_curve or self.cpu_curve, *self._roof("cpu"))
        seconds[-1] = max(seconds[-1], self.cpu[1][-1])
        return n, seconds

    @cached_property
    def device(self) -> tuple[np.ndarray, np.ndarray]:
        """The breakpoints of the device's curve."""
        return _breakpoints(self.device_curve, *self._roof("device"))

    @cached_property
    def contended(self) -> bool:
        """Whether the CPU or the link is slower while the other works."""
        return bool(self.cpu_beside_curve or self.link_beside_bytes_per_s)

    def _roof(self, lane: str) -> tuple[float, float]:
        """S / bytes_per_s and f / flops."""
        return (
            self.expert_bytes / getattr(self, f"{lane}_bytes_per_s"),
            self.flops_per_token / getattr(self, f"{lane}_flops"),
        )

    def break_even(self) -> float:
        """The token count n* beyond which computing an expert on the CPU takes longer than copying it

        0 if it always takes longer, infinite if it never does.
        """
        copy = self.expert_bytes / self.link_bytes_per_s
        if not self.cpu_curve:
            return self.cpu_flops * self.expert_bytes / (self.flops_per_token * self.link_bytes_per_s)
        n, seconds = self.cpu
        if seconds[0] >= copy:
            return 0.0
        if seconds[-1] <= copy:
            return math.inf
        after = int(np.searchsorted(seconds, copy))
        share = (copy - seconds[after - 1]) / (seconds[after] - seconds[after - 1])
        return float(n[after - 1] + share * (n[after] - n[after - 1]))


def slower(curve: Curve, factor: float) -> Curve:
    """The curve of a lane that takes `factor` times as long."""
    return tuple((n, factor * seconds) for n, seconds in curve)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{_OP}: {name}={value!r} is of type {type(value).__name__}, expected a number")
    if name in _RATES:
        if not value > 0:
            raise ValueError(f"{_OP}: {name}={value!r}, expected a rate above 0")
    elif not 0 <= value < math.inf:
        raise ValueError(f"{_OP}: {name}={value!r}, expected a finite number of at least 0")


def _curve(name: str, pairs: Iterable[Iterable[float]]) -> Curve:
    """The points as a tuple of pairs (JSON has lists), after checks."""
    try:
        points = tuple((float(n), float(seconds)) for n, seconds in pairs)
    except (TypeError, ValueError):
        raise TypeError(f"{_OP}: {name}={pairs!r}, expected pairs (tokens, seconds)") from None
    before_n, before = 0.0, 0.0
    for n, seconds in points:
        if not before_n < n < _FAR or not max(before, 1e-300) <= seconds < math.inf:
            raise ValueError(
                f"{_OP}: {name} has the point ({n:g}, {seconds!r}) after ({before_n:g}, {before!r}): tokens must be "
                "above 0 and increase, seconds must be above 0 and not decrease"
            )
        before_n, before = n, seconds
    return points


def _breakpoints(curve: Curve, floor: float, each: float) -> tuple[np.ndarray, np.ndarray]:
    """The breakpoints of a curve, or of max(floor, n each) without one, up to _FAR tokens."""
    if curve:
        n, seconds = (list(values) for values in zip(*curve, strict=True))
        slope = (seconds[-1] - seconds[-2]) / (n[-1] - n[-2]) if len(n) > 1 else 0.0
        return np.array([*n, _FAR]), np.array([*seconds, seconds[-1] + slope * (_FAR - n[-1])])
    if not each or floor >= each * _FAR:
        return np.array([0.0, _FAR]), np.array([floor, floor])
    return np.array([0.0, floor / each, _FAR]), np.array([floor, floor, each * _FAR])
