"""b_G = sum_G r s / sum_G s^2 - slope, mean and rms of the errors by index, tile, tail and segment.

r are the errors and s the golden, both in units of the bound. Every statistic is compared with the same statistic of the
ensemble's members, so that noise which is shared along a row (an inverse rms, a maximum) is not taken for a pattern.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .ladder_noise import BIAS_FLOOR, SLOPE_Z, Noise

if TYPE_CHECKING:
    from .ladder import Reference

_TILES = (2, 4, 8, 16, 32, 64, 128)
_RMS_RATIO = 3.0  # a group whose errors are this many times the noisiest member's, in rms


@dataclass(frozen=True)
class Pattern:
    """One statistic that stands out. key names it across seeds; text says it; index is the group's indices on its axis."""

    key: tuple
    text: str
    measured: float
    limit: float


@dataclass(frozen=True)
class Bias:
    """value and z of one statistic over the whole tensor."""

    value: float
    z: float
    share: float  # of the noise's rms: how much of a typical error the bias makes up


def slope(r: Tensor, noise: Noise) -> Bias:
    """b = <y, g> / <g, g> - 1, both in units of the bound; its standard error is the larger of the ensemble's and the
    one that independent errors would have."""
    return _bias(r, noise, noise.signal)


def offset(r: Tensor, noise: Noise) -> Bias:
    """mean of the errors, in units of the bound"""
    return _bias(r, noise, noise.judged.to(torch.float32))


def _bias(r: Tensor, noise: Noise, direction: Tensor) -> Bias:
    d = direction.double()
    power = float(d.square().sum())
    if not noise.usable or power == 0:
        return Bias(0.0, 0.0, 0.0)
    value = float((r.double() * d).sum()) / power
    members = (noise.errors.double() * d).flatten(1).sum(1) / power
    seen = float(members.square().mean().sqrt())
    independent = float((d * noise.scale).square().sum().sqrt()) / power
    error = max(seen, independent)
    floor = max(noise.rms, 1e-30)
    return Bias(value, value / error if error else 0.0, abs(value) * math.sqrt(power / noise.count) / floor)


def counts(bias: Bias) -> bool:
    return abs(bias.z) > SLOPE_Z and bias.share > BIAS_FLOOR


def found(r: Tensor, noise: Noise, ref: Reference) -> list[Pattern]:
    """Every statistic beyond its limit, the strongest first."""
    out = []
    b, o = slope(r, noise), offset(r, noise)
    if counts(b):
        out.append(Pattern(("slope",), f"slope {b.value:+.3e} (z = {b.z:+.1f})", abs(b.z), SLOPE_Z))
    if counts(o):
        out.append(Pattern(("offset",), f"errors of one sign (mean {o.value:+.3f} of the bound, z = {o.z:+.1f})",
                           abs(o.z), SLOPE_Z))  # fmt: skip
    if r.dim():
        stack = torch.cat([r.unsqueeze(0), noise.errors])
        groups = list(_groups(stack, noise, ref))
        tests = sum(g.sums.shape[-1] for g in groups)
        for group in groups:
            out += _outstanding(group, noise, tests)
    return sorted(out, key=lambda p: -p.measured / p.limit)


@dataclass
class _Group:
    """Sums over the elements of each group: (4, K + 1, groups) of r s, s s, r, r r; counts (groups,)."""

    key: tuple
    names: list[str]
    sums: Tensor
    sizes: Tensor


def _groups(stack: Tensor, noise: Noise, ref: Reference) -> Iterator[_Group]:
    signal = noise.signal.unsqueeze(0)
    parts = torch.stack([stack * signal, (signal * signal).expand_as(stack), stack, stack * stack])
    judged = noise.judged.to(torch.float32)
    for axis in range(judged.dim()):
        n = judged.shape[axis]
        if n < 2 or judged.dim() == 1 and n > 1024:
            pass  # single elements of a long vector are rung 2's business, its tiles are still looked at
        others = [d + 2 for d in range(judged.dim()) if d != axis]
        sums = (parts.sum(others) if others else parts).double()
        sizes = judged.sum([d - 2 for d in others]).double() if others else judged.double()
        name = ref.axes[axis] if axis < len(ref.axes) else str(axis)
        if n > 1 and judged.dim() > 1:
            yield _Group(("index", axis), [f"axis {name} at {i}" for i in range(n)], sums, sizes)
        for tile in _TILES:
            if tile * 2 <= n:
                yield from _tiles(axis, name, n, tile, sums, sizes)
    for segment, (axis, lo, hi) in ref.segments.items():
        part, size = parts.narrow(axis % judged.dim() + 2, lo, hi - lo), judged.narrow(axis, lo, hi - lo)
        sums = part.flatten(2).sum(2, keepdim=True).double()
        yield _Group(("segment", segment), [f"segment {segment}"], sums, size.sum().double().reshape(1))


def _tiles(axis: int, name: str, n: int, tile: int, sums: Tensor, sizes: Tensor) -> Iterator[_Group]:
    """Indices of equal residue mod `tile`; and the tail behind the last whole tile."""
    residue = torch.arange(n, device=sums.device) % tile
    merged = torch.zeros(*sums.shape[:-1], tile, dtype=sums.dtype, device=sums.device).index_add(-1, residue, sums)
    size = torch.zeros(tile, dtype=sizes.dtype, device=sums.device).index_add(0, residue, sizes)
    names = [f"axis {name} at {i} mod {tile}" for i in range(tile)]
    yield _Group(("mod", axis, tile), names, merged, size)
    whole = n // tile * tile
    if whole < n:
        tail = sums[..., whole:].sum(-1, keepdim=True)
        yield _Group(("tail", axis, tile), [f"axis {name} from {whole} (tail of {tile})"], tail, sizes[whole:].sum(0, True))


def _outstanding(group: _Group, noise: Noise, tests: int) -> list[Pattern]:
    along, power, plain, square = group.sums
    some = group.sizes > 1
    if not bool(some.any()):
        return []
    out = []
    limit = noise.limit(tests)
    sizes = group.sizes.clamp(min=1)
    floor = BIAS_FLOOR * math.sqrt(noise.rms**2 + float(noise.quantum.double().square().sum()) / noise.count)
    rms = (square / sizes).sqrt()
    own = torch.clamp(rms[1:].amax(0), min=floor)
    for kind, statistic in (("slope", along / power.clamp(min=1e-30).sqrt()), ("mean", plain / sizes.sqrt())):
        # both are about as large as one element's noise when errors are independent; shared noise shows in the members
        spread = statistic[1:].square().mean(0).sqrt()
        spread = torch.maximum(torch.maximum(spread, spread.square().mean().sqrt()), own)
        excess = statistic[0].abs() / spread
        biased = statistic[0].abs() / sizes.sqrt() > own
        out += _strongest(group, kind, torch.where(some & biased, excess, 0.0), limit)
    lasting = some & (sizes >= 8)
    out += _strongest(group, "rms", torch.where(lasting, rms[0] / own, 0.0), _RMS_RATIO * (1 + 4 / math.sqrt(8)))
    return out


_SAYS = {"slope": "errors proportional to the value", "mean": "errors of one sign", "rms": "larger errors than elsewhere"}


def _strongest(group: _Group, kind: str, excess: Tensor, limit: float) -> list[Pattern]:
    worst = int(excess.argmax())
    measured = float(excess[worst])
    if not measured > limit:
        return []
    text = f"{group.names[worst]}: {_SAYS[kind]} ({measured:.1f} times the noise, limit {limit:.1f})"
    return [Pattern((kind, *group.key, worst), text, measured, limit)]
