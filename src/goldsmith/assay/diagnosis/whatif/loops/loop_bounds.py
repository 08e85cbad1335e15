"""Loops with a wrong bound: the first or last place of a running sum's input, or of a gradient's addend, is left out.

The changes of sums cover a bound of their own addends. Here the missing place belongs to the input of a running sum, or
to an addend of a gradient: in every iteration of a loop, or at the one operator that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, with_result

_MADE = frozenset("mul div add sub neg exp rsub where select_backward slice_backward".split())
_ALSO = ("truncated_reduction", "missing_term")
_TURNS = (1, 2, 3, 4)  # such operators of one line in each iteration of a loop
_SINGLE, _MOST, _LEAST = 3, 400, 3


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    lines: dict[tuple, list[Node]] = {}
    for call in calls:
        if call.index in among and call.name in _MADE and floating(call.out) and call.owns and call.out.dim():
            lines.setdefault((call.name, call.line, call.backward, call.out.dim()), []).append(call)
    count = 0
    for members in lines.values():
        for part in _parts(members):
            for axis in range(part[0].out.dim()):
                if max(call.out.shape[axis] for call in part) < _LEAST:
                    continue
                for place, which in ((-1, "last"), (0, "first")):
                    count += 1
                    if count <= _MOST:
                        yield _without(part, axis, place, which)


def _parts(members: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """Single operators if they are few; in a loop, those of every iteration together."""
    if len(members) <= _SINGLE:
        yield from ([call] for call in members)
    for turn in _TURNS:
        if len(members) > turn and len(members) % turn == 0:
            yield from (members[first::turn] for first in range(turn))


def _without(part: Sequence[Node], axis: int, place: int, which: str) -> Change:
    def left_out(out: Tensor) -> Tensor:
        if not out.shape[axis]:
            return out
        out = out.clone()
        out.select(axis, place).zero_()
        return out

    changed: Any = with_result(left_out)
    often = f", in {len(part)} places" if len(part) > 1 else ""
    text = f"the {which} along axis {axis} of {part[0].expression} is left out{often}"
    group = tuple((call.index, changed) for call in part) if len(part) > 1 else ()
    params = {"term": part[0].expression, "axis": axis}
    return Change("off_by_one", text, part[0].index, changed, params, 0.35, group=group, also=_ALSO)
