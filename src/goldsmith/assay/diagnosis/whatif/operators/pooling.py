"""Pooling windows that lack a row or column, padding that takes part, and borders mirrored about the wrong place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...graph.node import Changed, Node
from ...graph.tensors import floating
from ..change import Change, instead

_MAX, _MEAN = ("max_pool2d_with_indices", "max_pool2d"), ("avg_pool2d",)
_MIRRORS = {"reflection_pad1d": 1, "reflection_pad2d": 2, "reflection_pad3d": 3}
_SHORT = ("truncated_reduction", "wrong_mask")
Place = Callable[[Tensor, int], Tensor]  # (padded places, n) -> the places of the input that they show


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.backward or not call.args or not floating(call.args[0]):
        return
    if call.name in _MAX or call.name in _MEAN:
        yield from _pooled(call)
    elif call.name in _MIRRORS:
        yield from _mirrored(call, _MIRRORS[call.name])


# windows


def _two(value: Any, default: tuple[int, int]) -> tuple[int, int]:
    value = [value] if isinstance(value, int) else list(value or ())
    return (value[0], value[-1]) if value else default


def _pooled(call: Node) -> Iterator[Change]:
    """Changes of a maximum or mean over two-dimensional windows, without dilation."""
    size = _two(call.args[1], (1, 1))
    step = _two(call.args[2] if len(call.args) > 2 else None, size)
    pad = _two(call.args[3] if len(call.args) > 3 else 0, (0, 0))
    more = call.args[4:]
    if any(m not in (None, False, True, 1) and _two(m, (1, 1)) != (1, 1) for m in more):
        return
    top = call.name in _MAX

    def pooled(lo: tuple[int, int], hi: tuple[int, int], fill: float) -> Changed:
        def run(func: Any, args: tuple, kwargs: dict) -> Any:
            out = func(*args, **kwargs)
            like = out[0] if isinstance(out, tuple) else out
            x = F.pad(args[0], (pad[1], pad[1], pad[0], pad[0]), value=fill)
            seen = x.unfold(-2, size[0], step[0]).unfold(-2, size[1], step[1])
            seen = seen[..., lo[0] : size[0] - hi[0], lo[1] : size[1] - hi[1]]
            result = seen.amax((-2, -1)) if top else seen.sum((-2, -1)) / (size[0] * size[1])
            if result.shape != like.shape:
                raise RuntimeError("windows beyond the border")
            return (result, *out[1:]) if isinstance(out, tuple) else result

        return run

    fill = -torch.inf if top else 0.0
    for end, word in ((1, "last"), (0, "first")):
        for what, cut in (("row", (1, 0)), ("column", (0, 1)), ("row and column", (1, 1))):
            if all(s > c for s, c in zip(size, cut, strict=True)):
                lo, hi = ((0, 0), cut) if end else (cut, (0, 0))
                text = f"the {word} {what} of every window of {call.expression} is not looked at"
                yield Change("off_by_one", text, call.index, pooled(lo, hi, fill), {}, 0.6, also=_SHORT)
    if top and max(pad):
        text = f"{call.expression} is padded with 0: padding enters the maximum"
        yield Change("wrong_mask", text, call.index, pooled((0, 0), (0, 0), 0.0), {}, 0.6, also=("stray_read",))


# borders


def _mirrored(call: Node, dims: int) -> Iterator[Change]:
    places: list[tuple[str, str, Place]] = [
        ("off_by_one", "the far border repeats its last position", lambda p, n: _far(p.abs(), n, 1)),
        ("off_by_one", "the near border repeats its first position",
         lambda p, n: _far(torch.where(p < 0, -1 - p, p), n, 0)),
        ("off_by_one", "both borders repeat their end", lambda p, n: _far(torch.where(p < 0, -1 - p, p), n, 1)),
        ("off_by_one", "the far border is mirrored one position too far", lambda p, n: _far(p.abs(), n, -1)),
        ("invalid_index", "borders repeat the nearest position", lambda p, n: p.clamp(0, n - 1)),
        ("invalid_index", "borders wrap around to the other end", lambda p, n: p % n),
    ]  # fmt: skip
    pads = list(call.args[1])
    for cause, text, place in places:
        for axes in (tuple(range(dims)), *((d,) for d in range(dims) if dims > 1)):

            def padded(x: Tensor, *args: object, axes: tuple[int, ...] = axes, place: Place = place) -> Tensor:
                for d in range(dims):
                    axis, (before, after) = x.dim() - 1 - d, pads[2 * d : 2 * d + 2]
                    n = x.shape[axis]
                    at = torch.arange(-before, n + after, device=x.device)
                    at = place(at, n) if d in axes else _far(at.abs(), n, 0)
                    x = x.index_select(axis, at.clamp(0, n - 1))
                return x

            some = "" if len(axes) == dims else f" of axis -{axes[0] + 1}"
            yield Change(cause, f"in {call.expression} {text}{some}", call.index, instead(padded), {}, 0.6,
                         also=("invalid_index", "off_by_one", "wrong_mask"))  # fmt: skip


def _far(place: Tensor, n: int, off: int) -> Tensor:
    return torch.where(place < n, place, 2 * (n - 1) + off - place)
