"""The primitives of windows and borders: pooling, mirrored padding, taps, convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..golden_edit import OperatorCall


def pool(
    call: OperatorCall, *, size: tuple[int, int], step: tuple[int, int], pad: tuple[int, int], top: bool,
    lo: tuple[int, int], hi: tuple[int, int], fill: float,
) -> Any:  # fmt: skip
    """A maximum or a mean over windows without their first `lo` and last `hi` rows and columns."""
    out = call.on(*call.args)
    like = out[0] if isinstance(out, tuple) else out
    x = F.pad(call.x, (pad[1], pad[1], pad[0], pad[0]), value=fill)
    seen = x.unfold(-2, size[0], step[0]).unfold(-2, size[1], step[1])
    seen = seen[..., lo[0] : size[0] - hi[0], lo[1] : size[1] - hi[1]]
    result = seen.amax((-2, -1)) if top else seen.sum((-2, -1)) / (size[0] * size[1])
    if result.shape != like.shape:
        raise RuntimeError("windows beyond the border")
    return (result, *out[1:]) if isinstance(out, tuple) else result


def _far(place: Tensor, n: int, off: int) -> Tensor:
    return torch.where(place < n, place, 2 * (n - 1) + off - place)


def _near(place: Tensor) -> Tensor:
    return torch.where(place < 0, -1 - place, place)


# the position of the input that a padded position shows, of n
BORDERS = {
    "the far border repeats its last position": lambda p, n: _far(p.abs(), n, 1),
    "the near border repeats its first position": lambda p, n: _far(_near(p), n, 0),
    "both borders repeat their end": lambda p, n: _far(_near(p), n, 1),
    "the far border is mirrored one position too far": lambda p, n: _far(p.abs(), n, -1),
    "borders repeat the nearest position": lambda p, n: p.clamp(0, n - 1),
    "borders wrap around to the other end": lambda p, n: p % n,
}


def mirror(call: OperatorCall, *, pads: tuple[int, ...], axes: tuple[int, ...], border: str) -> Tensor:
    """Reflection padding, with another border along these axes, counted from the last."""
    x = call.x
    for d in range(len(pads) // 2):
        axis, (before, after) = x.dim() - 1 - d, pads[2 * d : 2 * d + 2]
        n = x.shape[axis]
        at = torch.arange(-before, n + after, device=x.device)
        at = BORDERS[border](at, n) if d in axes else _far(at.abs(), n, 0)
        x = x.index_select(axis, at.clamp(0, n - 1))
    return x


# windows of an axis


def slide(x: Tensor, *, axis: int, step: int) -> Tensor:
    """Position i shows position i + step; zeros beyond the end."""
    out = x.roll(-step, axis)
    out.select(axis, -1 if step > 0 else 0).zero_()
    return out


def zero_place(x: Tensor, *, axis: int, at: int) -> Tensor:
    out = x.clone()
    if x.shape[axis]:
        out.select(axis, at).zero_()
    return out


def slide_taps(call: OperatorCall, *, axis: int, first: int, last: int, step: int, around: bool) -> Tensor:
    """Windows in which each tap's own places in [first, last) move on by one; its padding stays."""
    out = call.on(*call.args).clone()
    for j in range(call.args[2]):
        tap = out.select(-1, j)
        lo, hi = max(first - j, 0), min(last - j, tap.shape[axis])
        if hi - lo < 2:
            continue
        part = tap.narrow(axis, lo, hi - lo)
        new = part.roll(-step, axis)
        if not around:
            end = -1 if step > 0 else 0
            new.select(axis, end).copy_(part.select(axis, end))
        part.copy_(new)
    return out


def store_taps(call: OperatorCall, *, last: bool) -> Tensor:
    """The gradient of windows, stored instead of added: of several taps at a place the last, or the first, is left."""
    grad, sizes, dim, size, by = call.args[:5]
    out = grad.new_zeros(list(sizes))
    dim %= out.dim()
    for j in range(size) if last else reversed(range(size)):
        out.index_copy_(dim, torch.arange(grad.shape[dim], device=grad.device) * by + j, grad.select(-1, j))
    return out


# convolutions


def flip(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    return x.flip(axes)
