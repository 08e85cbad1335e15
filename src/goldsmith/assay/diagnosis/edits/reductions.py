"""Reductions and matrix products: cut short, divided by another count, over other axes, in separate blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node
from ..graph.tensors import floating
from .golden_edit import CALL, RESULT, NamedEdit, Part, Primitive, do, named
from .primitives.formulas import applied
from .primitives.repartitions import neutral, reduce_over
from .primitives.spans import BLOCKS, Span, cuts
from .primitives.tensors import STRIDES, constant, repeat_last, restrict, restrict_blocks, scale, transpose

_REDUCES = ("sum", "mean", "amax", "amin", "logsumexp", "prod", "linalg_vector_norm", "cumsum", "max", "argmax")
_PRODUCTS = {"mm": (1, 0), "bmm": (2, 1), "dot": (0, 0), "mv": (1, 0), "addmm": (1, 0), "baddbmm": (2, 1)}
_CARRIED = ("truncated_reduction", "missing_term")
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if not node.args or not floating(node.args[0]):
        return
    if node.name in _REDUCES:
        yield from _cut_short(node)
        yield from _counted(node)
        yield from _other_axes(node)
    if node.name in _PRODUCTS and floating(node.args[_first(node)]) and floating(node.args[_first(node) + 1]):
        yield from _products(node)
    if not node.backward:
        yield from _triangular(node)


def axes_of(node: Node) -> list[int]:
    """The axes of a reduction."""
    x = node.args[0]
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if node.name == "linalg_vector_norm":
        dims = node.args[2] if len(node.args) > 2 else None
    if isinstance(dims, bool) or dims is None:
        dims = list(range(x.dim()))
    axes = [dims] if isinstance(dims, int) else list(dims)
    return [a % x.dim() for a in axes] if x.dim() and axes else list(range(x.dim()))


def one_axis(node: Node) -> int | None:
    """The one axis that a sum or mean runs along; None for none or several."""
    dims = node.args[1] if len(node.args) > 1 else None
    return dims[0] % node.args[0].dim() if isinstance(dims, list | tuple) and len(dims) == 1 else None


def cut(name: str, operand: str, axis: int, n: int) -> Iterator[tuple[str, float, str, Span, dict]]:
    """(cause, prior, text, the part that is left, params) of a loop over n that covers a part of it."""
    of = f" over {operand}" if operand else ""
    for span in cuts(n):
        lo, hi = span.of(n)
        if lo:  # a loop that loses its beginning seldom starts late: each iteration overwrites the one before
            cause, prior = "off_by_one" if lo == 1 and n > 2 else "overwritten_accumulator", 0.6
        else:
            cause, prior = "off_by_one" if hi == n - 1 and n % 8 != 1 else "truncated_reduction", 0.7
        missing = [0, lo] if lo else [hi, n]
        params = {"input": operand, "axis": axis, "missing": missing}
        yield cause, prior, f"{name} runs{of} [{lo}, {hi}) of {n}: {span.text}", span, params


def _cut_short(node: Node) -> Iterator[NamedEdit]:
    x, fill = node.args[0], neutral(node.name)
    for axis in axes_of(node):
        n = x.shape[axis]
        for cause, prior, text, span, params in cut(node.name, node.operand(0), axis, n):
            part = 0, do(restrict, axis=axis, span=span, fill=fill)
            yield named(node, cause, prior, text, part, **params)
            if node.name == "mean":
                lo, hi = span.of(n)
                share = RESULT, do(scale, c=n / (hi - lo))
                yield named(node, cause, prior - 0.1, f"{text}, divided by what it runs over", part, share, **params)


def _counted(node: Node) -> Iterator[NamedEdit]:
    """Divided by the wrong number, or not at all; padding in a maximum, or the last element counted twice."""
    axes, expression = axes_of(node), node.expression
    n = prod(node.args[0].shape[a] for a in axes)
    counts: dict[str, tuple[float, str]] = {}
    if node.name == "mean" and n > 1:
        counts[str(n)] = float(n), f"is not divided by its count {n}"
        counts[f"{n}/{n - 1}"] = n / (n - 1), f"is divided by {n - 1}, one less than its count"
        for block in BLOCKS:
            padded = -(-n // block) * block
            if padded != n:
                counts.setdefault(f"{n}/{padded}", (n / padded, f"is divided by {padded}, its count padded to {block}"))
    if node.name == "sum" and n > 1:
        counts[f"1/{n}"] = 1.0 / n, f"is divided by its count {n}"
    for i, (name, (c, how)) in enumerate(counts.items()):
        share = RESULT, do(scale, c=c)
        yield named(node, "wrong_factor", 0.5 - 0.01 * i, f"{expression} {how}", share, named=name)
    if node.name == "amax":
        text = f"{expression} takes part of zeros: padding enters the maximum"
        yield named(
            node, "wrong_mask", 0.7, text, (RESULT, do(applied, of=partial(torch.clamp, min=0))), operator=node.name
        )
    if node.name == "sum" and len(axes) == 1:
        length = node.args[0].shape[axes[0]]
        for block in (b for b in BLOCKS if length > 1 and -length % b):
            text = f"{expression} counts the last element {-length % block + 1} times: "
            text += f"the block of {block} is clamped, not masked"
            repeat = 0, do(repeat_last, axis=axes[0], block=block)
            yield named(node, "wrong_mask", 0.4, text, repeat, axis=axes[0])


def _other_axes(node: Node) -> Iterator[NamedEdit]:
    """Along all axes in place of some, along one in place of several, or along another one."""
    x, axes, place = node.args[0], axes_of(node), 2 if node.name == "linalg_vector_norm" else 1
    if node.name not in ("sum", "mean", "amax", "logsumexp", "linalg_vector_norm", "cumsum") or x.dim() < 2:
        return
    own = ", ".join(map(str, axes))
    others = [(a,) for a in range(x.dim())] if len(axes) > 1 else [tuple(range(x.dim()))]
    others += [tuple(sorted([*axes, a])) for a in range(x.dim()) if a not in axes and len(axes) + 1 < x.dim()]
    for other in others if node.name not in ("logsumexp", "cumsum") and isinstance(node.out, Tensor) else ():
        where = f"axis {other[0]}" if len(other) == 1 else f"axes {', '.join(map(str, other))}"
        where = "all axes" if len(other) == x.dim() else where
        over = CALL, do(reduce_over, axes=other, own=tuple(axes), keep=node.out.dim() == x.dim())
        text = f"{node.expression} runs along {where} instead of {own}"
        yield named(node, "wrong_axis", 0.65, text, over, input=node.operand(0), axis=other[0], golden_axis=axes[0])
    for axis in (d for d in range(x.dim()) if len(axes) == 1 and d != axes[0] and x.shape[d] > 1):
        if len(node.args) > place:
            several = isinstance(node.args[place], list | tuple)
            along = place, do(constant, new=(axis,) if several else axis)
            params: dict[str, Any] = {"input": node.operand(0), "axis": axis, "golden_axis": axes[0]}
            text = f"{node.expression} runs along axis {axis} instead of {own}"
            yield named(node, "wrong_axis", 0.7, text, along, **params)
            share = RESULT, do(scale, c=x.shape[axes[0]] / x.shape[axis])
            yield named(node, "wrong_axis", 0.65, f"{text}, and is divided by its length", along, share, **params)


def _first(node: Node) -> int:
    return 1 if node.name in ("addmm", "baddbmm") else 0


def _products(node: Node) -> Iterator[NamedEdit]:
    left, right = _PRODUCTS[node.name]
    first = _first(node)
    a, b = node.args[first], node.args[first + 1]
    operand = node.operand(first) or node.operand(first + 1)
    for cause, prior, text, span, params in cut(node.name, operand, left, a.shape[left]):
        both = ((first, do(restrict, axis=left, span=span)), (first + 1, do(restrict, axis=right, span=span)))
        yield named(node, cause, prior, text, *both, **params)
    square = [t.dim() >= 2 and t.shape[-1] == t.shape[-2] > 1 for t in (a, b)]
    if all(square):
        flips = ((first, do(transpose)), (first + 1, do(transpose)))
        text = f"both operands of {node.expression} are transposed"
        yield named(node, "transposed", 0.6, text, *flips, operand="both")
    for i, t, same in ((first, a, square[0]), (first + 1, b, square[1])):
        name = node.operand(i) or "an operand"
        if same:
            text = f"{name} is transposed in {node.expression}"
            yield named(node, "transposed", 0.75, text, (i, do(transpose)), operand=name)
        elif t.dim() >= 2 and min(t.shape[-2:]) > 1:
            for text, read in STRIDES:
                text = f"{text.format(name)} in {node.expression}"
                yield named(node, "wrong_stride", 0.6, text, (i, do(read)), operand=name)


def repeated(node: Node) -> Iterator[NamedEdit]:
    """A product that counts several times; used for groups only, since a single product is a fitted term."""
    if node.name in ("mm", "bmm") and floating(node.out):
        text = f"{node.expression} is multiplied by"
        yield named(node, "repeated_term", 0.6, text, (RESULT, do(scale, c=1.0)), free=1.0)


def _triangular(node: Node) -> Iterator[NamedEdit]:
    """Causal sums, by a lower triangular matrix, that a kernel takes chunk by chunk with too little carried over."""
    x = node.args[0]
    if node.name not in ("mm", "bmm", "sum") or x.dim() < 2 or not x.shape[-1] == x.shape[-2] > 2 or not bool(x.any()):
        return
    if node.name == "sum" and axes_of(node) != [x.dim() - 1] or bool(x.triu(1).any()) == bool(x.tril(-1).any()):
        return
    for chunk in (c for c in _CHUNKS if c < x.shape[-1]):
        for reach, how in (
            (0, "nothing is carried over from previous chunks"), (1, "only the previous chunk is carried over"),
        ):  # fmt: skip
            within: tuple[Part, Primitive] = 0, do(restrict_blocks, size=chunk, reach=reach)
            if bool((within[1](x) != x).any()):
                text = f"in chunks of {chunk} of {node.expression} {how}"
                yield named(node, "overwritten_accumulator", 0.55, text, within, also=_CARRIED, chunk=chunk)
