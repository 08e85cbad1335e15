"""Indices and views: the right numbers from the wrong place, in another order, or from another offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node
from ..graph.tensors import floating, whole
from .golden_edit import CALL, RESULT, NamedEdit, Part, do, named
from .primitives import positions as p
from .primitives.formulas import unchanged
from .primitives.tensors import constant, transpose

_INDEXED = {"index_select": 2, "gather": 2, "embedding": 1, "index_add": 2, "index_add_": 2, "scatter_add": 2,
            "scatter_add_": 2, "index_copy": 2, "scatter": 2}  # fmt: skip
_ROWS = frozenset("gather scatter scatter_add scatter_add_".split())
_SUMMING = ("index_add", "index_add_", "scatter_add", "scatter_add_")
_COMPUTED = frozenset("mm bmm sum mul add sub div mean amax sqrt rsqrt logsumexp".split())
_PER_BLOCK = frozenset("amax amin sum mean logsumexp rsqrt sqrt reciprocal div linalg_vector_norm".split())
_PAIRED = frozenset("add add_ sub sub_ rsub mul mul_ div where maximum minimum addcmul".split())
# (cause, rule, text, prior) for an index
_RULES = (
    ("shifted", "one too high", "one too high", 0.5),
    ("shifted", "one too low", "one too low", 0.5),
    ("shifted", "one too high, at most the last", "one too high, at most the last", 0.45),
    ("wrong_stride", "halved", "halved: a stride of half the size", 0.55),
    ("wrong_stride", "doubled", "doubled: a stride of twice the size", 0.55),
    ("invalid_index", "at most the last but one", "at most the last but one", 0.3),
    ("wrong_stride", "its own place", "its own place in order: the index is ignored", 0.4),
    ("permuted", "in reverse order", "in reverse order", 0.4),
    ("permuted", "sorted", "sorted", 0.4),
    ("permuted", "the order that it undoes", "the order that it undoes", 0.5),
)
_FORMATS = ("without their sign", "shifted by 8", "shifted by 128", "as the low four bits", "as the high four bits")


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name in _INDEXED:
        at, name = _INDEXED[node.name], node.operand(_INDEXED[node.name]) or "the index"
        n = node.args[0].shape[_axis(node)]
        index = node.args[at]
        width = node.args[0].numel() // n if n and node.name in ("index_select", "embedding", "index_add") else 1
        if whole(index) and n:
            yield from _replaced(node, at, index, n, max(width, 1), f"{name} in {node.expression} is", {"index": name})
    if node.name in ("index", "index_put", "index_put_"):
        yield from _indexed(node)
    if node.name in _ROWS:
        yield from _rows(node)
    if node.name in _SUMMING:
        yield from _stored(node)
    yield from _views(node)
    if node.name == "_to_copy" and floating(node.out):
        yield from _converted(node)
    if floating(node.out) and node.out.numel() > 1 and node.name in _COMPUTED:
        for axis, n in enumerate(node.out.shape):
            for step in (1, -1) if n > 2 else (1,) if n == 2 else ():
                text = f"the result of {node.expression} is shifted by {step} along axis {axis}"
                roll = RESULT, do(p.shift, axis=axis, step=step, edge="around")
                yield named(node, "shifted", 0.3, text, roll, axis=axis, step=step)
    if not node.backward and node.name in _PER_BLOCK and floating(node.out) and 1 < node.out.numel() <= 1 << 14:
        for axis, n in enumerate(node.out.shape):  # one of several numbers, such as a block's scale
            text = f"the first entry along axis {axis} of {node.expression} is used for all"
            first = RESULT, do(p.reindex, axis=axis, rule="first")
            if n > 1:
                yield named(node, "wrong_stride", 0.36, text, first, also=("invalid_index", "wrong_factor"), axis=axis)
    if not node.backward and node.name in _PAIRED and floating(node.out):
        for i, a in enumerate(node.args):  # a table with a number for each pair
            if floating(a) and a.dim() > 1 and a.shape[-1] == a.shape[-2] > 1 and not torch.equal(a, a.mT):
                name = node.operand(i) or "a table"
                text = f"{node.expression} reads {name} by its columns, not by its rows"
                yield named(node, "transposed", 0.6, text, (i, do(transpose)), also=("invalid_index",), operand=name)


def _axis(node: Node) -> int:
    dim = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) and node.name != "embedding" else 0
    return dim % max(node.args[0].dim(), 1)


def _replaced(
    node: Node, part: Part, index: Tensor, n: int, width: int, what: str, params: dict[str, Any]
) -> Iterator[NamedEdit]:
    for cause, rule, text, prior in _RULES:
        also: tuple[str, ...] = ("invalid_index",) if cause == "wrong_stride" else ()
        if rule == "its own place" and index.numel() > 1 and len(index.unique()) == index.numel():
            cause, also = "permuted", ("invalid_index", "wrong_stride")  # no place twice: the table is an order
        yield named(node, cause, prior, f"{what} {text}", (part, do(p.replace_index, rule=rule, n=n)), also=also,
                    **params)  # fmt: skip
    for bits in (8, 16, 32):
        if n * width > 2 ** (bits - 1):
            wrap = part, do(p.replace_index, rule=f"wrapped {bits}", n=n, width=width)
            yield named(node, "index_overflow", 0.6, f"{what} wrapped at {bits} bits", wrap, **params)


def _indexed(node: Node) -> Iterator[NamedEdit]:
    x, indices, expression = node.args[0], node.args[1], node.expression
    for place, index in enumerate(indices):
        if whole(index):
            n, width = x.shape[place], prod(x.shape[place + 1 :])
            yield from _replaced(node, (1, place), index, n, width, f"an index of {expression} is", {})
            if node.name == "index" and place == 0 and len([i for i in indices if i is not None]) == 1:
                for bits, dtype in ((8, torch.int8), (16, torch.int16), (32, torch.int32)):
                    if n * width > 2 ** (bits - 1):
                        text = f"the offsets of {expression} wrap at {bits} bits"
                        flat = CALL, do(p.flat_lookup, dtype=dtype, width=width)
                        yield named(node, "index_overflow", 0.7, text, flat, bits=bits)
    if node.name.startswith("index_put") and len(node.args) > 3 and node.args[3]:
        text = f"{expression} stores where it should add: of several updates of one element one is left"
        yield named(node, "lost_update", 0.7, text, (3, do(constant, new=False)))


def _rows(node: Node, small: int = 8) -> Iterator[NamedEdit]:
    """One index of a row used for all; a scatter that then writes to one place twice stores or adds."""
    index, axis = node.args[2], node.args[1]
    if not whole(index) or not index.dim() or not isinstance(axis, int) or not 1 < index.shape[axis] <= small:
        return
    axis %= index.dim()
    name, expression = node.operand(2) or "the index", node.expression
    text = f"{expression} reads each row in order: the index {name} is ignored"
    ignored = 2, do(p.one_of_row, axis=axis, place=None)
    yield named(node, "invalid_index", 0.5, text, ignored, also=("permuted", "wrong_stride"), index=name)
    for place, which in ((0, "first"), (-1, "last")):
        text = f"the {which} of every row of {name} is used for the whole row in {expression}"
        also = ("wrong_format", "wrong_stride")
        alone = 2, do(p.one_of_row, axis=axis, place=place)
        yield named(node, "invalid_index", 0.45, text, alone, also=also, index=name, axis=axis)
        if node.name == "scatter" and isinstance(node.args[3], Tensor):
            added = CALL, do(p.store_added, axis=axis, place=place)
            yield named(node, "invalid_index", 0.45, f"{text}, and colliding values are added", added, also=also,
                        index=name, axis=axis)  # fmt: skip


def _stored(node: Node) -> Iterator[NamedEdit]:
    """Updates that are stored instead of added, and groups that begin or end one too early or too late."""
    index, expression = node.args[2], node.expression
    if index.numel() > 4096:
        return
    indexed = node.name.startswith("index_add")
    ordered = index.dim() == 1 and len(index) > 2 and not bool((index.diff() < 0).any())
    if indexed and ordered and bool(index.diff().any()):
        for edge, late, how in (
            ("begin", False, "begins one too early"), ("end", True, "ends one too late"),
            ("begin", True, "begins one too late"), ("end", False, "ends one too early"),
        ):  # fmt: skip
            text = f"every group of {expression} {how}"
            borders = CALL, do(p.shift_groups, edge=edge, late=late)
            yield named(node, "off_by_one", 0.6, text, borders, axis=_axis(node))
    # consecutive rows of one place are summed in a loop, not scattered
    runs = ordered and 1 < len(index.unique()) < len(index)
    cause, *also = ("overwritten_accumulator", "lost_update") if indexed and runs else ("lost_update",)
    for last, which in ((True, "last"), (False, "first")):
        text = f"{expression} stores where it should add: of several updates of one element the {which} is left"
        stored = CALL, do(p.store_updates, last=last, keep=True)
        yield named(node, cause, 0.7 + 0.02 * len(also), text, stored, also=tuple(also), left=which)
    if floating(node.args[0]) and bool(node.args[0].any()):
        text = f"{expression} stores over what was there"
        over = CALL, do(p.store_updates, last=True, keep=False)
        yield named(node, "overwritten_accumulator", 0.5, text, over)


def _views(node: Node) -> Iterator[NamedEdit]:
    x = node.args[0] if node.args else None
    if not isinstance(x, Tensor):
        return
    name = node.operand(0) or "an operand"
    if node.name in ("t", "transpose", "permute", "flip", "roll"):
        if x.shape == node.out.shape and x.dim() > 1 and not torch.equal(x, node.out):
            cause, how = {"flip": ("permuted", "reversed"), "roll": ("shifted", "rolled")}.get(
                node.name, ("transposed", "transposed"))  # fmt: skip
            text = f"{name} is not {how} by {node.name}"
            yield named(node, cause, 0.75, text, (CALL, do(unchanged)), operand=name)
    if node.name in ("slice", "select", "narrow") and x.is_floating_point() and x.dim():
        yield from _parts(node, x)
    repeated = node.operand(0) or "what is repeated"
    if node.name == "clone" and x.numel():
        for axis in range(1, x.dim()):
            if x.stride(axis) == 0 and x.shape[axis] > 1 and x.shape[axis - 1] > 1 and x.stride(axis - 1):
                groups, each = x.shape[axis - 1 : axis + 1]
                text = f"{repeated} is taken in turn, h % {groups} of axis {axis - 1}, and not by groups, h // {each}"
                turn = CALL, do(p.repeat_in_turn, axis=axis)
                yield named(node, "permuted", 0.6, text, turn, also=("wrong_stride", "invalid_index"),
                            operand=repeated, axis=axis - 1)  # fmt: skip
    if node.name == "repeat" and x.numel() and len(node.args[1]) == x.dim():
        for axis, times in enumerate(node.args[1]):
            if times > 1 and x.shape[axis] > 1:
                text = f"{repeated} is taken by groups, h // {times} of axis {axis}, and not in turn, "
                text += f"h % {x.shape[axis]}"
                by_group = CALL, do(p.repeat_in_groups, axis=axis)
                yield named(node, "permuted", 0.6, text, by_group, also=("wrong_stride", "invalid_index"),
                            operand=repeated, axis=axis)  # fmt: skip


def _parts(node: Node, x: Tensor) -> Iterator[NamedEdit]:
    """A part of a tensor taken from another offset along the same axis."""
    axis, select = (node.args[1] if len(node.args) > 1 else 0) % x.dim(), node.name == "select"
    expression = node.expression
    n, size = x.shape[axis], 1 if select else node.out.shape[axis]
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    start = start % n if n else 0
    if select and x.dim() == 2 and min(x.shape) > 1:
        text = f"{expression} is read as if the axes of {node.operand(0) or 'what it reads'} lay in the other order"
        across = CALL, do(p.select_across, axis=axis)
        yield named(node, "wrong_stride", 0.5, text, across, also=("transposed", "permuted"), operand=node.operand(0),
                    axis=axis)  # fmt: skip
    if select and not node.backward and floating(x) and n > 1:
        for step, side in ((1, "after"), (-1, "before")):  # no index in the text, so that all turns change together
            text = f"{expression} reads the position {side} its own along axis {axis}"
            neighbour = CALL, do(p.select_neighbour, step=step)
            yield named(node, "shifted", 0.42, text, neighbour, also=("off_by_one", "invalid_index"), axis=axis,
                        step=step)  # fmt: skip
    for other in dict.fromkeys((0, start - 1, start + 1, start - size, start + size, n - size)) if size < n else ():
        if other != start and 0 <= other <= n - size:
            near = abs(other - start) == 1
            cause = "off_by_one" if near and size > 1 else "wrong_stride" if other else "missing_partition"
            text = f"{expression} begins at {other} instead of {start} of axis {axis}"
            moved = CALL, do(p.narrow, axis=axis, start=other, size=size, squeeze=select)
            params: dict[str, Any] = {"axis": axis, "from": other}
            yield named(node, cause, 0.45, text, moved, **params)


def _converted(node: Node) -> Iterator[NamedEdit]:
    """Converted integers whose bits are read as another format."""
    x = node.args[0]
    if not whole(x):
        return
    name = node.operand(0) or "the stored numbers"
    other = {torch.int8: torch.uint8, torch.uint8: torch.int8}.get(x.dtype)
    if other is not None:
        text = f"the bytes of {name} are read as {str(other).removeprefix('torch.')}"
        yield named(node, "wrong_format", 0.7, text, (0, do(p.view_bytes, dtype=other)), input=name)
    for rule in _FORMATS:
        convert = CALL, do(p.convert, rule=rule)
        yield named(node, "wrong_format", 0.4, f"{name} is read {rule}", convert, input=name)


def integer_signs(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """Small integers read with a sign that they do not have, or without the sign that they have."""
    if node.name not in ("_to_copy", "mul", "sub", "add", "div") or not floating(node.out):
        return
    for i, t in enumerate(node.args[:2]):
        if not whole(t) or t.numel() < 2:
            continue
        least, most = int(t.min()), int(t.max())
        bits = next((b for b in (2, 3, 4, 5, 6, 8) if -(1 << b - 1) <= least and most < 1 << b - (least < 0)), 0)
        kinds = [("without a sign", f"as {bits} bits without a sign")] if bits and least < 0 else []
        if bits and least >= 0 and most >= 1 << bits - 1:
            kinds = [("with a sign", f"as {bits} bits with a sign"),
                     ("sign and magnitude", f"as a sign and {bits - 1} bits")]  # fmt: skip
        for rule, how in kinds:
            name = node.operand(i) or "the stored numbers"
            read = i, do(p.replace_integers, rule=rule, c=bits)
            yield named(node, "wrong_format", 0.5, f"{name} is read {how}", read, input=name)
