"""Pooling windows that lack a row or column, padding that takes part, and borders mirrored about the wrong place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import CALL, NamedEdit, do, named
from ..primitives.windows import mirror, pool

_MAX, _MEAN = ("max_pool2d_with_indices", "max_pool2d"), ("avg_pool2d",)
_MIRRORS = {"reflection_pad1d": 1, "reflection_pad2d": 2, "reflection_pad3d": 3}
_BORDERS = (
    ("off_by_one", "the far border repeats its last position"),
    ("off_by_one", "the near border repeats its first position"),
    ("off_by_one", "both borders repeat their end"),
    ("off_by_one", "the far border is mirrored one position too far"),
    ("invalid_index", "borders repeat the nearest position"),
    ("invalid_index", "borders wrap around to the other end"),
)


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.backward or not node.args or not floating(node.args[0]):
        return
    if node.name in _MAX or node.name in _MEAN:
        yield from _pooled(node)
    elif node.name in _MIRRORS:
        yield from _mirrored(node, _MIRRORS[node.name])


def _two(value: Any, default: tuple[int, int]) -> tuple[int, int]:
    value = [value] if isinstance(value, int) else list(value or ())
    return (value[0], value[-1]) if value else default


def _pooled(node: Node) -> Iterator[NamedEdit]:
    """A maximum or mean over two-dimensional windows, without dilation."""
    size = _two(node.args[1], (1, 1))
    step = _two(node.args[2] if len(node.args) > 2 else None, size)
    pad = _two(node.args[3] if len(node.args) > 3 else 0, (0, 0))
    if any(m not in (None, False, True, 1) and _two(m, (1, 1)) != (1, 1) for m in node.args[4:]):
        return
    top, none = node.name in _MAX, (0, 0)
    settings: dict[str, Any] = {"size": size, "step": step, "pad": pad, "top": top}
    for which, end in (("last", True), ("first", False)):
        for what, cut in (("row", (1, 0)), ("column", (0, 1)), ("row and column", (1, 1))):
            if all(s > c for s, c in zip(size, cut, strict=True)):
                text = f"the {which} {what} of every window of {node.expression} is not looked at"
                part = do(pool, **settings, lo=none if end else cut, hi=cut if end else none,
                          fill=-torch.inf if top else 0.0)  # fmt: skip
                yield named(node, "off_by_one", 0.6, text, (CALL, part), also=("truncated_reduction", "wrong_mask"))
    if top and max(pad):
        text = f"{node.expression} is padded with 0: padding enters the maximum"
        padded = CALL, do(pool, **settings, lo=none, hi=none, fill=0.0)
        yield named(node, "wrong_mask", 0.6, text, padded, also=("stray_read",))


def _mirrored(node: Node, dims: int) -> Iterator[NamedEdit]:
    pads = tuple(node.args[1])
    for cause, text in _BORDERS:
        for axes in (tuple(range(dims)), *((d,) for d in range(dims) if dims > 1)):
            some = "" if len(axes) == dims else f" of axis -{axes[0] + 1}"
            mirrored = CALL, do(mirror, pads=pads, axes=axes, border=text)
            yield named(node, cause, 0.6, f"in {node.expression} {text}{some}", mirrored,
                        also=("invalid_index", "off_by_one", "wrong_mask"))  # fmt: skip
