"""Describes in words where the wrong elements of a tensor are, and what the tensor looks like."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..golden.golden_tensor import GoldenTensor
from ..report.results import Location

_RANGES = 6  # an axis with more separate ranges is summarised


def locate(name: str, bad: Tensor, ref: GoldenTensor) -> Location:
    """Where the True elements of `bad` are: segments, index ranges per axis (inclusive), share, and a sentence.

    Axes that are bad at every index are left out.
    """
    count, total = int(bad.sum()), max(bad.numel(), 1)
    fraction = count / total
    if count == 0:
        return Location(name)
    segments = _segments(bad, ref)
    hit = {axis: _ranges(_along(bad, axis)) for axis in range(bad.dim())}
    whole = {axis: [(0, bad.shape[axis] - 1)] for axis in hit}
    names = {axis: ref.axes[axis] if axis < len(ref.axes) else str(axis) for axis in hit}
    axes = {names[a]: r for a, r in hit.items() if r != whole[a]}
    words = [f"segment {', '.join(segments)}"] if segments else []
    for axis, ranges in hit.items():
        if ranges != whole[axis] and bad.shape[axis] > 1:
            words.append(f"axis {names[axis]}: {_say(ranges, bad.shape[axis])}")
    if count == total:
        words = ["every element"]
    elif not words:
        words = ["scattered over the whole tensor"]
    share = f"{count} of {total} elements ({_percent(fraction)})"
    return Location(name, tuple(segments), axes, fraction, f"{'; '.join(words)}; {share}")


def _along(bad: Tensor, axis: int) -> Tensor:
    others = [d for d in range(bad.dim()) if d != axis]
    return bad.any(dim=others) if others else bad


def _ranges(flags: Tensor) -> list[tuple[int, int]]:
    index = torch.nonzero(flags).flatten().tolist()
    out: list[tuple[int, int]] = []
    for i in index:
        if out and i == out[-1][1] + 1:
            out[-1] = (out[-1][0], i)
        else:
            out.append((i, i))
    return out


def _say(ranges: list[tuple[int, int]], n: int) -> str:
    if len(ranges) > _RANGES:
        single = [lo for lo, _ in ranges]
        for tile in (2, 4, 8, 16, 32, 64, 128):
            residues = {i % tile for lo, hi in ranges for i in range(lo, hi + 1)}
            if len(residues) * 2 <= tile and len(residues) <= 4:
                return f"indices {', '.join(map(str, sorted(residues)))} mod {tile}"
        return f"{sum(hi - lo + 1 for lo, hi in ranges)} of {n} indices from {single[0]} to {ranges[-1][1]}"
    text = ", ".join(str(lo) if lo == hi else f"{lo}..{hi}" for lo, hi in ranges)
    return text + (" (to the end)" if len(ranges) == 1 and ranges[0][1] == n - 1 and ranges[0][0] > 0 else "")


def _segments(bad: Tensor, ref: GoldenTensor) -> list[str]:
    """The segments that together hold all bad elements; none when some lie outside every segment."""
    if not bad.dim():
        return []
    hits = {}
    for name, (axis, lo, hi) in ref.segments.items():
        hits[name] = int(bad.narrow(axis, lo, hi - lo).sum())
    inside = [name for name, n in hits.items() if n]
    return inside if inside and sum(hits.values()) >= int(bad.sum()) and len(inside) < max(len(hits), 2) else []


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def worst(bad: Tensor, badness: Tensor, y: Tensor, ref: GoldenTensor) -> str:
    """The worst element: index, candidate, golden, bound. No relative error, because the golden may be 0."""
    i = _worst(bad, badness)
    index = [int(k) for k in torch.unravel_index(torch.tensor(i), bad.shape)] if bad.dim() else []
    actual, golden = float(y.flatten()[i]), float(ref.bounded.value.flatten()[i])
    bound = float(ref.bounded.bound.flatten()[i])
    return f"worst at {index}: got {actual:.8g}, golden {golden:.8g}, bound {bound:.2g}"


def worst_golden(bad: Tensor, badness: Tensor, ref: GoldenTensor) -> float:
    """The golden's number at the worst element."""
    return float(ref.bounded.value.flatten()[_worst(bad, badness)])


def _worst(bad: Tensor, badness: Tensor) -> int:
    return int(torch.where(bad, torch.nan_to_num(badness, torch.inf), -1.0).flatten().argmax())


def looks_like(y: Tensor, ref: GoldenTensor) -> list[str]:
    """Simple descriptions of a wrong tensor: zeros, a constant factor, a flipped sign, a transposition, a shift, a
    reversal.
    """
    g = ref.bounded.value
    if y.numel() < 2 or not bool(torch.isfinite(g).all()):
        return []
    out = []
    y = torch.nan_to_num(y, 0.0, 0.0, 0.0)
    nonzero = g != 0
    zeros = float(((y == 0) & nonzero).sum()) / max(int(nonzero.sum()), 1)
    if zeros == 1:
        return ["all zeros"]
    if zeros > 0.05:
        out.append(f"zero at {_percent(zeros)} of the golden's nonzero elements")
    norm = float(g.square().sum())
    ratio = float((y * g).sum()) / norm if norm else 1.0
    residual = float((y - ratio * g).square().sum()) / max(float((y - g).square().sum()), 1e-300)
    if residual < 1e-2 and (ratio_text := f"{ratio:.6g}") != "1":
        out.append("the sign is flipped" if abs(ratio + 1) < 1e-3 else f"the golden times {ratio_text}")
    wrong = float((y - g).square().sum())
    for text, other in _rearranged(g):
        if float((y - other).square().sum()) < 1e-4 * wrong:
            out.append(text)
    return out


def _rearranged(g: Tensor) -> Iterator[tuple[str, Tensor]]:
    if g.dim() >= 2 and g.shape[-1] == g.shape[-2]:
        yield "the golden with its last two axes transposed", g.transpose(-1, -2)
    for axis in range(g.dim()):
        if g.shape[axis] > 2:
            for step in (1, -1):
                yield f"the golden shifted by {step:+d} along axis {axis}", g.roll(step, axis)
            yield f"the golden reversed along axis {axis}", g.flip(axis)
