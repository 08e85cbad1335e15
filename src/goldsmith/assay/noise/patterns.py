"""b_G = sum_G r s / sum_G s^2: slope, mean and rms of the errors, grouped by index, tile, tail and segment.

r are the errors and s is the golden, both in units of the bound. Every statistic is compared with that of the
ensemble's members, so that noise shared along a row (an inverse rms, a maximum) does not count as a pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .noise_floor import BIAS_FLOOR, SLOPE_Z, Direction, Noise

_TILES = (2, 4, 8, 16, 32, 64, 128)
_RMS_LIMIT = 7.0  # rms of a group in units of the noisiest member's; groups have at least 8 elements


@dataclass(frozen=True)
class Pattern:
    """One statistic beyond its limit; `key` identifies it across seeds, `text` describes it."""

    key: tuple
    text: str
    measured: float
    limit: float


@dataclass(frozen=True)
class Bias:
    """value and z of one statistic over the whole tensor."""

    value: float
    z: float
    share: float  # of the rms of the noise: how much of a typical error is bias
    least: float = 0.0  # smaller values are legal


def slope(r: Tensor, noise: Noise) -> Bias:
    """b = <y, g> / <g, g> - 1, both in units of the bound.

    z uses the larger of two standard errors: that of the ensemble, and that of independent errors.
    """
    return _bias(r, noise, noise.along_signal, noise.least_slope)


def offset(r: Tensor, noise: Noise) -> Bias:
    """mean of the errors, in units of the bound"""
    return _bias(r, noise, noise.along_ones, noise.least_offset)


def _bias(r: Tensor, noise: Noise, direction: Direction | None, least: float) -> Bias:
    if direction is None:
        return Bias(0.0, 0.0, 0.0)
    value = float((r * direction.vector).sum(dtype=torch.float64)) / direction.power
    share = abs(value) * math.sqrt(direction.power / noise.count) / max(noise.rms, 1e-30)
    return Bias(value, value / direction.error if direction.error else 0.0, share, least)


def counts(bias: Bias) -> bool:
    return abs(bias.z) > SLOPE_Z and bias.share > BIAS_FLOOR and abs(bias.value) > bias.least


def error_patterns(r: Tensor, noise: Noise, groups: Groups | None) -> list[Pattern]:
    """Every statistic beyond its limit, the strongest first. groups: None for a scalar."""
    out = []
    b, o = slope(r, noise), offset(r, noise)
    if counts(b):
        out.append(Pattern(("slope",), f"slope {b.value:+.3e} (z = {b.z:+.1f})", abs(b.z), SLOPE_Z))
    if counts(o):
        text = f"errors of one sign (mean {o.value:+.3f} of the bound, z = {o.z:+.1f})"
        out.append(Pattern(("offset",), text, abs(o.z), SLOPE_Z))
    if groups is not None and groups.count:
        out += groups.outstanding(r)
    return sorted(out, key=lambda p: -p.measured / p.limit)


@dataclass
class _AxisGroups:
    """Groups along one axis: the sum at index source[j] goes into group target[j]."""

    axis: int
    source: Tensor
    target: Tensor
    first: int
    families: list[tuple[tuple, int]]  # (key, number of groups), in the order of the groups


class Groups:
    """Index, residue, tail and segment groups of one tensor, with the statistics of the ensemble's members in each."""

    def __init__(self, noise: Noise, axes: tuple[str, ...], segments: Mapping[str, tuple[int, int, int]]):
        self._noise, self._names = noise, axes
        shape = noise.judged.shape
        self._axes = [_axis(a, n, len(shape), noise.judged.device) for a, n in enumerate(shape)] if len(shape) else []
        self._segments = list(segments.items())
        self._families = [f for a in self._axes for f in a.families]
        self._families += [(("segment", name, axis), 1) for name, (axis, _, _) in self._segments]
        self.count = sum(n for _, n in self._families) if shape.numel() else 0
        if self.count:
            self._learn()

    def _learn(self) -> None:
        noise = self._noise
        signal, judged = noise.signal, noise.judged.to(torch.float32)
        self.power = self._sums((signal * signal).unsqueeze(0))[0].clamp(min=1e-30)
        self.sizes = self._sums(judged.unsqueeze(0))[0].clamp(min=1.0)
        self._some = self._sums(judged.unsqueeze(0))[0] > 1
        along, plain, square = (self._sums(t) for t in self._parts(noise.errors))
        quantum = float(noise.quantum.double().square().sum()) / max(noise.count, 1)
        floor = BIAS_FLOOR * math.sqrt(noise.rms**2 + quantum)
        self._own = (square / self.sizes).sqrt().amax(0).clamp(min=max(floor, 1e-30))
        family = torch.repeat_interleave(
            torch.arange(len(self._families)), torch.tensor([n for _, n in self._families])
        ).to(along.device)
        self._spread = {}
        for kind, statistic in (("slope", along / self.power.sqrt()), ("mean", plain / self.sizes.sqrt())):
            # equals the noise of one element if errors are independent; shared noise shows in the members
            mean = statistic.square().mean(0)
            pooled = torch.zeros(len(self._families), dtype=mean.dtype, device=mean.device)
            pooled = pooled.index_add(0, family, mean) / torch.bincount(family, minlength=len(self._families))
            self._spread[kind] = torch.maximum(torch.maximum(mean, pooled[family]).sqrt(), self._own)

    def _parts(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return r * self._noise.signal, r, r * r

    def _sums(self, t: Tensor) -> Tensor:
        """(B, *shape) -> (B, groups)"""
        out = []
        for a in self._axes:
            others = [d + 1 for d in range(t.dim() - 1) if d != a.axis]
            sums = (t.sum(others) if others else t).double()
            groups = torch.zeros(t.shape[0], sum(n for _, n in a.families), dtype=torch.float64, device=t.device)
            out.append(groups.index_add(1, a.target, sums.index_select(1, a.source)))
        for _, (axis, lo, hi) in self._segments:
            part = t.narrow(axis % (t.dim() - 1) + 1, lo, hi - lo)
            out.append(part.flatten(1).sum(1, keepdim=True).double())
        return torch.cat(out, 1)

    def outstanding(self, r: Tensor) -> list[Pattern]:
        """Groups whose slope, mean or rms exceeds the limit, the strongest of each family and kind."""
        along, plain, square = (self._sums(t)[0] for t in self._parts(r.unsqueeze(0)))
        limit = self._noise.limit(3 * self.count)
        out = []
        least = {"slope": along.abs() > self._noise.least_slope * self.power,
                 "mean": plain.abs() > self._noise.least_offset * self.sizes}  # fmt: skip
        for kind, statistic in (("slope", along / self.power.sqrt()), ("mean", plain / self.sizes.sqrt())):
            biased = self._some & least[kind] & (statistic.abs() / self.sizes.sqrt() > self._own)
            out += self._strongest(kind, torch.where(biased, statistic.abs() / self._spread[kind], 0.0), limit)
        lasting = self._some & (self.sizes >= 8)
        rms = (square / self.sizes).sqrt() / self._own
        return out + self._strongest("rms", torch.where(lasting, rms, 0.0), _RMS_LIMIT)

    def _strongest(self, kind: str, excess: Tensor, limit: float) -> list[Pattern]:
        if not bool((excess > limit).any()):
            return []
        out, first = [], 0
        for key, n in self._families:
            part = excess[first : first + n]
            first += n
            i = int(part.argmax())
            measured = float(part[i])
            if measured > limit:
                text = (
                    f"{self._group_name(key, i)}: {_DESCRIPTIONS[kind]} "
                    f"({measured:.1f} times the noise, limit {limit:.1f})"
                )
                out.append(Pattern((kind, *key, i), text, measured, limit))
        return out

    def _group_name(self, key: tuple, i: int) -> str:
        kind, where, *rest = key
        if kind == "segment":
            return f"segment {where}"
        axis = f"axis {self._names[where] if where < len(self._names) else where}"
        if kind == "index":
            return f"{axis} at {i}"
        return f"{axis} at {i} mod {rest[0]}" if kind == "mod" else f"{axis} from {rest[1]} (tail of {rest[0]})"


def _axis(axis: int, n: int, dims: int, device: torch.device) -> _AxisGroups:
    """Groups of an axis of length n: each index (except in a vector, where rung 2 judges it), residues, tails."""
    index = torch.arange(n)
    source, target, first = [], [], 0
    families: list[tuple[tuple, int]] = []
    if n > 1 and dims > 1:
        source.append(index)
        target.append(index)
        families.append((("index", axis), n))
        first = n
    for tile in (t for t in _TILES if 2 * t <= n):
        source.append(index)
        target.append(first + index % tile)
        families.append((("mod", axis, tile), tile))
        first += tile
        whole = n // tile * tile
        if whole < n:
            source.append(index[whole:])
            target.append(torch.full((n - whole,), first))
            families.append((("tail", axis, tile, whole), 1))
            first += 1
    empty = torch.zeros(0, dtype=torch.int64)
    return _AxisGroups(
        axis, torch.cat([empty, *source]).to(device), torch.cat([empty, *target]).to(device), first, families
    )


_DESCRIPTIONS = {
    "slope": "errors proportional to the value",
    "mean": "errors of one sign",
    "rms": "larger errors than elsewhere",
}
