"""Recognises a candidate that is the golden rearranged, or stored in another dtype's width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import torch
from torch import Tensor

from .evidence import ErrorPattern

_MATCH = 0.99  # share of the error's squares that a pattern must explain
_FEW, _MOST = 6, 1 << 22  # elements, at least and at most, that are followed one by one
_ROWS = 512  # slices of an axis that are matched with each other, at most
_FLOATS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-18, torch.float64: 2.0**-18}


def patterns(
    tensor: str,
    got: Tensor,
    golden: Tensor,
    *,
    bound: Tensor | None = None,
    others: Mapping[str, Tensor] | None = None,
) -> list[ErrorPattern]:
    """Patterns that explain 99 % of the error, the best and simplest first; empty if there is no error.

    got     as the candidate stored it, since its bytes are read as well
    golden  float64; others: the golden's other results, which may have been exchanged with this one
    """
    if got.shape != golden.shape or golden.numel() < 2:
        return []
    got = got.detach()
    y = got.double()
    finite = torch.isfinite(y)
    allowed = 1e-6 * golden.abs() if bound is None else torch.where(torch.isfinite(bound), bound, 0.0)
    wrong = torch.where(finite, y - golden, 0.0)
    if bool(finite.all()) and not bool((wrong.abs() > 1.02 * allowed).any()):
        return []
    whole = bool(finite.all()) and bool(torch.isfinite(golden).all())  # every number is equally far from an infinity
    matches = [] if not whole else _rearrangements(tensor, y, golden, allowed, others or {})
    return [*matches, *_widths(tensor, got, golden)]


def _match(y: Tensor, golden: Tensor, other: Tensor) -> float:
    """Share of y's error that disappears when y is compared with `other` instead of the golden."""
    wrong = float((y - golden).square().sum())
    return 1 - float((y - other).square().sum()) / wrong if wrong else 0.0


# rearranged


def _rearrangements(
    tensor: str, y: Tensor, g: Tensor, allowed: Tensor, others: Mapping[str, Tensor]
) -> list[ErrorPattern]:
    matches = []
    for kind, params, text, other in _whole(g):
        match = _match(y, g, other)
        if match >= _MATCH:
            matches.append(ErrorPattern(tensor, kind, match, params, (), f"{tensor} is the golden {text}"))
    for other_name, other in others.items():
        if (
            other_name != tensor
            and other.numel() == g.numel()
            and (match := _match(y, g, other.reshape(g.shape))) >= _MATCH
        ):
            text = f"{tensor} holds the golden's {other_name}"
            matches.append(ErrorPattern(tensor, "swapped", match, {"with": other_name}, (), text))
    shifts = list(_shifts(tensor, y, g))
    matches += [p for p in shifts if p.params["around"]][:1] or shifts[:1]
    if not matches:
        matches += _permutations(tensor, y, g, allowed)
    if not matches:
        matches += _elements(tensor, y, g)
    return _with_alternatives(matches)


def _whole(g: Tensor) -> Iterator[tuple[str, dict[str, object], str, Tensor]]:
    for i, j in combinations(range(g.dim()), 2):
        if g.shape[i] > 1 and g.shape[j] > 1:
            same = g.shape[i] == g.shape[j]
            text = f"with axes {i} and {j} transposed" + ("" if same else " in the other's strides")
            yield "transposed", {"axes": [i, j]}, text, g.transpose(i, j).reshape(g.shape)
    for i, j in combinations(range(g.dim()), 2):
        if g.shape[i] > 1 and g.shape[j] > 1 and g.shape[i] != g.shape[j]:
            shape = list(g.shape)
            shape[i], shape[j] = shape[j], shape[i]
            text = f"with axes {i} and {j} exchanged in its strides"
            yield "transposed", {"axes": [i, j], "inverse": True}, text, g.reshape(shape).transpose(i, j)
    for axis in range(g.dim()):
        if g.shape[axis] > 1:
            yield "reversed", {"axis": axis}, f"reversed along axis {axis}", g.flip(axis)


def _shifts(tensor: str, y: Tensor, g: Tensor) -> Iterator[ErrorPattern]:
    """Shifts along every axis and in memory (axis None) by the best-correlated step, circular or cut off."""
    views = [(axis, y.movedim(axis, -1), g.movedim(axis, -1)) for axis in range(g.dim())]
    tries: list[tuple[int | None, Tensor, Tensor]] = [*views] if g.dim() > 0 else []
    if g.dim() > 1:
        tries.append((None, y.flatten(), g.flatten()))
    for axis, a, b in tries:
        n = a.shape[-1]
        step = _best_step(a, b) if n > 2 else 0
        if step == 0:
            continue
        rolled = b.roll(step, -1)
        match = _match(a, b, rolled)
        # cut off: only the overlap must fit, and it must be most of the axis
        lo, hi = max(step, 0), n + min(step, 0)
        inner = _match(a[..., lo:hi], b[..., lo:hi], rolled[..., lo:hi]) if hi - lo >= max(2, n // 2) else 0.0
        if max(match, inner) < _MATCH:
            continue
        where = "in memory" if axis is None else f"along axis {axis}"
        around = match >= _MATCH
        text = f"{tensor} is the golden shifted by {step:+d} {where}" + ("" if around else ", cut off at the end")
        params = {"axis": axis, "step": step, "around": around}
        yield ErrorPattern(tensor, "shifted", max(match, inner), params, (), text)


def _best_step(a: Tensor, b: Tensor) -> int:
    """The circular shift of b along the last axis that correlates best with a, in -n/2..n/2."""
    n = a.shape[-1]
    product = torch.fft.rfft(a.reshape(-1, n)) * torch.fft.rfft(b.reshape(-1, n)).conj()
    step = int(torch.fft.irfft(product.sum(0), n=n).argmax())
    return step if step <= n // 2 else step - n


def _permutations(tensor: str, y: Tensor, g: Tensor, allowed: Tensor) -> Iterator[ErrorPattern]:
    """Slices of an axis in another order, or each copied from another place."""
    for axis in range(g.dim()):
        rows, own = (t.movedim(axis, 0).reshape(t.shape[axis], -1) for t in (y, g))
        n, width = own.shape
        if not 2 <= n <= _ROWS or n * n * width > 1 << 24 or (width < 2 and n < 4):
            continue
        squares = rows.square().sum(1)[:, None] + own.square().sum(1)[None] - 2 * rows @ own.T
        index = squares.argmin(1)
        if bool((index == torch.arange(n, device=index.device)).all()):
            continue
        other = own[index]
        match = _match(rows, own, other)
        bijective = len(set(index.tolist())) == n
        few = width < 3  # a single number is close to another by chance
        if match < _MATCH or few and not bijective or not _close(rows, other, allowed if few else None):
            continue
        moved = int((index != torch.arange(n, device=index.device)).sum())
        if not bijective and len(set(index.tolist())) < 2:
            continue
        what = "in another order" if bijective else "with slices taken from elsewhere"
        text = f"{tensor} is the golden {what} along axis {axis}: {moved} of {n} slices moved"
        params = {"axis": axis, "index": index.tolist(), "bijective": bijective, "moved": moved}
        yield ErrorPattern(tensor, "permuted", match, params, (), text)


def _elements(tensor: str, y: Tensor, g: Tensor) -> Iterator[ErrorPattern]:
    """The golden's exact numbers in another order; numbers that occur twice cannot be followed."""
    mine, wanted = (t.flatten().to(torch.float32) for t in (y, g))
    n = mine.numel()
    if not _FEW <= n <= _MOST or not torch.equal(mine.sort().values, wanted.sort().values) or len(mine.unique()) < n:
        return
    index = torch.empty(n, dtype=torch.int64)
    index[mine.argsort().cpu()] = wanted.argsort().cpu()
    moved = int((index != torch.arange(n)).sum())
    text = f"{tensor} holds all of the golden's numbers bit for bit, {moved} of {n} at other places"
    yield ErrorPattern(tensor, "permuted", 1.0, {"moved": moved, "bijective": True}, (), text)


def _close(a: Tensor, b: Tensor, allowed: Tensor | None) -> bool:
    """Nearest slices are always similar; these must be equal except for rounding."""
    tolerance = 2e-2 * float(b.abs().max()) if allowed is None else 4 * float(allowed.max())
    return bool((a - b).abs().max() <= tolerance)


def _with_alternatives(matches: list[ErrorPattern]) -> list[ErrorPattern]:
    """The patterns; those that explain the same elements name each other in `also`."""
    labels = [p.text for p in matches]
    return [
        ErrorPattern(p.tensor, p.kind, p.match, p.params, tuple(t for t in labels if t != p.text), p.text)
        for p in sorted(matches, key=lambda p: -round(p.match, 6))
    ]


# read in another width


def _widths(tensor: str, got: Tensor, g: Tensor) -> Iterator[ErrorPattern]:
    """The bytes, read as another dtype, equal the golden, up to the number of elements that they hold."""
    if got.dtype not in _FLOATS:
        return
    raw = got.contiguous().flatten()
    flat = g.flatten()
    for dtype, precision in _FLOATS.items():
        if dtype == got.dtype or (raw.numel() * raw.element_size()) % dtype.itemsize:
            continue
        # a wider dtype written into this buffer: only the first elements fit
        read = raw.view(torch.uint8).view(dtype).double()
        count = min(len(read), len(flat))
        # a narrower dtype fills the first part of the buffer; the rest is unused
        a, b = read[:count], flat[:count]
        scale = float(b.square().mean()) ** 0.5
        if count < 2 or not 0 < scale < torch.inf or not bool(torch.isfinite(a).all()):
            continue
        near = (a - b).abs() <= 2 * precision * b.abs() + 1e-6 * scale + precision * 1e-2 * scale
        share = float(near.double().mean())
        if share >= _MATCH:
            stored, declared = str(dtype).removeprefix("torch."), str(got.dtype).removeprefix("torch.")
            text = f"the bytes of {tensor} ({declared}) are the golden's first {count} elements in {stored}"
            yield ErrorPattern(
                tensor, "dtype_width", share, {"dtype": stored, "in": declared, "elements": count}, (), text
            )
