"""Loops with a wrong bound: the first or last place of a running sum's input, or of a gradient's addend, is left out.

The edits of sums cover a bound of their own addends. Here the missing place belongs to the input of a running sum, or
to an addend of a gradient: in every iteration of a loop, or at the one operator that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import RESULT, Action, GoldenEdit, NamedEdit, do
from ..primitives.windows import zero_place

_MADE = frozenset("mul div add sub neg exp rsub where select_backward slice_backward".split())
_TURNS = (1, 2, 3, 4)  # such operators of one line in each iteration of a loop
_SINGLE, _MOST, _LEAST = 3, 400, 3


def edits(graph: Graph) -> Iterator[NamedEdit]:
    lines: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if node.index in graph.behind and node.name in _MADE and floating(node.out) and node.owns and node.out.dim():
            lines.setdefault((node.name, node.line, node.backward, node.out.dim()), []).append(node)
    parts = (
        (part, axis, at, which)
        for members in lines.values() for part in _parts(members) for axis in range(part[0].out.dim())
        if max(node.out.shape[axis] for node in part) >= _LEAST
        for at, which in ((-1, "last"), (0, "first"))
    )  # fmt: skip
    for _, (part, axis, at, which) in zip(range(_MOST), parts, strict=False):
        often = f", in {len(part)} places" if len(part) > 1 else ""
        text = f"the {which} along axis {axis} of {part[0].expression} is left out{often}"
        without = do(zero_place, axis=axis, at=at)
        edit = GoldenEdit(tuple(Action(node.index, RESULT, without) for node in part), part[0].line)
        yield NamedEdit("off_by_one", text, edit, 0.35, {"term": part[0].expression, "axis": axis},
                        ("truncated_reduction", "missing_term"))  # fmt: skip


def _parts(members: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """Single operators if they are few; in a loop, those of every iteration together."""
    if len(members) <= _SINGLE:
        yield from ([node] for node in members)
    for turn in _TURNS:
        if len(members) > turn and len(members) % turn == 0:
            yield from (members[first::turn] for first in range(turn))
