"""Rows of a smaller operand repeated in the wrong order: p % n for p // m, or the reverse.

A row of [n, ...] that is broadcast over [n, m, ...] belongs to m consecutive places. A kernel with one program for each
of the n m places finds it by a division; the remainder gives another row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...graph.graph import Graph
from ...graph.tensors import floating
from ..golden_edit import Action, GoldenEdit, NamedEdit, do, named
from ..primitives.rows import repeat_rows, unrepeated

_TAKES = frozenset("mul mul_ add add_ sub sub_ div div_ rsub".split())
_ALSO = ("wrong_stride", "permuted")
_NODES, _MOST = 1 << 12, 256  # operators; axes and orders, roughly


def edits(graph: Graph) -> Iterator[NamedEdit]:
    """One operand alone, and all operands that are broadcast along the same axes."""
    groups: dict[tuple, list[Action]] = {}
    for node in graph.nodes[:_NODES]:
        if len(groups) > _MOST:
            break
        if node.index not in graph.behind or node.backward or node.name not in _TAKES or not floating(node.out):
            continue
        out = tuple(node.out.shape)
        for i, a in enumerate(node.args[:2]):
            for axis, first, how in _orders(a, out):
                name = node.operand(i) or f"an operand of {node.name}"
                rows = do(repeat_rows, shape=out, axis=axis, first=first)
                text = f"{name} in {node.expression} is read {how}"
                yield named(node, "invalid_index", 0.5, text, (i, rows), also=_ALSO, operand=name, axis=axis)
                groups.setdefault((axis, out[: axis + 2], how), []).append(Action(node.index, i, rows))
    for (axis, _, how), actions in groups.items():
        if 1 < len(actions) == len({action.at for action in actions}):
            text = f"all that is broadcast along axes {axis} and {axis + 1} is read {how}"
            yield NamedEdit("invalid_index", text, GoldenEdit(tuple(actions)), 0.49, {"axis": axis}, _ALSO)


def _orders(a: Any, out: tuple[int, ...]) -> Iterator[tuple[int, bool, str]]:
    """(first of the two axes, whether the first one is the operand's own, description)"""
    if not floating(a) or a.numel() < 2 or not out:
        return
    own = (1,) * (len(out) - a.dim()) + tuple(unrepeated(a).shape)
    for axis in range(len(out) - 1):
        n, m = out[axis : axis + 2]
        if min(n, m) > 1 and own[axis] == n and own[axis + 1] == 1:
            yield axis, True, f"by position % {n}, not by position // {m}"
        if min(n, m) > 1 and own[axis] == 1 and own[axis + 1] == m and axis + 2 < len(out):
            yield axis, False, f"by position // {n}, not by position % {m}"
