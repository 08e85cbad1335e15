"""Outer products with exchanged axes, divisions by varying counts, and interpolation that loses integer positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import RESULT, Action, NamedEdit, do, named
from ..primitives.formulas import applied
from ..primitives.tensors import constant, swap_axes, zero_where_zero

_LENGTHS = 12


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name in ("mul", "mm", "bmm") and len(node.tensors) == 2 and isinstance(node.out, Tensor):
        yield from _outer(node)
    if node.name in ("div", "div_") and len(node.args) > 1 and _counts(node.args[1]):
        yield from _divided(node, nodes)
    if node.name in ("rsub", "sub") and floating(node.out) and node.out.numel():
        yield from _interpolated(node)


def _outer(node: Node) -> Iterator[NamedEdit]:
    """a_i b_j in place of b_i a_j, if both axes are equally long."""
    out, product = node.out, node.name == "mul"
    for i, j in combinations(range(-out.dim(), 0), 2) if product else [(-2, -1)]:
        if out.dim() < 2 or out.shape[i] != out.shape[j] or out.shape[i] < 2:
            continue
        if not product or _crossed(node.args[0].shape, node.args[1].shape, i, j):
            text = f"the axes of {node.expression} are exchanged: {node.operand(1)} comes first"
            yield named(node, "transposed", 0.55 if product else 0.4, text, (RESULT, do(swap_axes, i=i, j=j)),
                        also=("swapped_results",), operand=node.expression, axes=[i, j])  # fmt: skip


def _crossed(a: torch.Size, b: torch.Size, i: int, j: int) -> bool:
    """Whether each operand varies along one axis only, and not the same one."""
    (ai, aj), (bi, bj) = (tuple(s[d] if -d <= len(s) else 1 for d in (i, j)) for s in (a, b))
    return (ai > 1 and aj == 1 and bi == 1 and bj > 1) or (ai == 1 and aj > 1 and bi > 1 and bj == 1)


def _counts(value: Any) -> bool:
    """Whether it holds integers from 1 up that are not all equal: the size of each group."""
    if not isinstance(value, Tensor) or value.numel() < 2 or value.dtype == torch.bool:
        return False
    return bool(((value == value.round()) & (value >= 1)).all()) and bool((value != value.flatten()[0]).any())


def _divided(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """Divided by the length of some axis in the golden, or by the largest count."""
    name = node.operand(1) or "a count"
    lengths = Counter(n for other in nodes for t in other.tensors for n in t.shape if n > 1)
    for n, _ in lengths.most_common(_LENGTHS):
        text = f"{node.expression} is divided by {n}, not by each group's {name}"
        yield named(node, "wrong_factor", 0.6, text, (1, do(constant, new=n)), factor=name, by=n)
    text = f"{node.expression} is divided by the largest of {name}"
    yield named(node, "wrong_factor", 0.5, text, (1, do(applied, of=torch.amax)), factor=name)


def _interpolated(node: Node) -> Iterator[NamedEdit]:
    """The weights of two neighbours are 1 - d and d. With the neighbours floor(x) and ceil(x), ceil(x) - x and
    x - floor(x) are both zero where x is an integer: exactly the values there are lost.
    """
    at = 0 if node.name == "rsub" else 1
    one, d = node.args[1 - at], node.args[at]
    scalar = isinstance(one, int | float) or isinstance(one, Tensor) and not one.dim()
    if scalar and float(one) == 1.0 and floating(d) and d.dim() and _distances(d.detach()):
        text = f"{node.expression} is 0, not 1, at integer positions: the values there are lost"
        edit = named(node, "missing_term", 0.55, text, also=("lost_update", "off_by_one"))
        action = Action(node.index, RESULT, do(zero_where_zero), (("d", (node.index, at)),))
        yield edit.acting(action)


def _distances(d: Tensor) -> bool:
    """Whether they are at least 0, somewhere exactly 0, and no mask of 0 and 1."""
    return bool((d >= 0).all()) and bool((d == 0).any()) and bool(((d > 0) & (d < 1)).any())
