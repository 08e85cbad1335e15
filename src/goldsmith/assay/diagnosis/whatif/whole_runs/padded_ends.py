"""Edits in which one line of the golden runs to the padded end, and all other lines stop at each sequence's end.

A loop over each sequence's own steps has no mask to leave out. So the golden also runs with every length set to the
padded length. One line then takes its value from that run: the state after a loop's last iteration, or a number that is
looked up at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...edits.golden_edit import RESULT, Action, EditedRun, GoldenEdit, NamedEdit, do
from ...edits.integers import filled
from ...graph.node import Node, maker_of
from ...graph.recording import Listening
from ...graph.tensors import floating
from ..changed_golden import ChangedGolden

_MOST = 4096  # operators; longer goldens get none of these edits
_LINES = 48
_LOOKS_UP = frozenset("index gather index_select embedding select slice".split())
Leaves = Mapping[str, Tensor]
Pairs = list[tuple[int, int]]  # (operator in the golden's run, the same operator in the run with full lengths)


class _FullRuns:
    """Repeats the golden with full lengths before each edited run, and keeps the outputs of its operators."""

    def __init__(self, search: ChangedGolden, full: NamedEdit):
        self.search, self.full = search, EditedRun(full.edit)
        self.outputs: dict[int, Any] = {}

    def calls(self, now: Leaves) -> list[Node]:
        mode = Listening().record()
        filled = {**now, **self.full.inputs(now)}
        self.search.golden.run_under(mode, filled, self.search.tensor)
        return mode.calls or []

    def run(self, now: Leaves) -> None:
        """Runs the golden with full lengths on `now`, and keeps the outputs."""
        try:
            self.outputs = {call.index: call.out for call in self.calls(now)}
        except Exception as error:
            raise RuntimeError("the golden does not run to the padded end") from error

    def out(self, out: Tensor, *, index: int) -> Tensor:
        return self.outputs[index].to(out.dtype).clone()


def changes(search: ChangedGolden, calls: Sequence[Node]) -> Iterator[NamedEdit]:
    if search.tensor.endswith(".grad") or len(calls) > _MOST:
        return
    material = search.examination.material
    for full in filled(search.leaves, {**material.sizes, **material.scalars}):
        full_runs = _FullRuns(search, full)
        try:
            other = full_runs.calls(search.leaves)
        except Exception:  # noqa: BLE001 - this golden cannot run with full lengths
            continue
        yield from _lines(calls, other, search.behind, full_runs, full.text)


def _lines(
    calls: Sequence[Node], other: Sequence[Node], among: set[int], full_runs: _FullRuns, how: str
) -> Iterator[NamedEdit]:
    theirs = _by_line(other)
    count = 0
    for key, mine in _by_line(calls).items():
        pairs, turns = _pairs(mine, theirs.get(key, []), calls, other)
        pairs = [(a, b) for a, b in pairs if a in among and not torch.equal(calls[a].out, other[b].out)]
        if not pairs:
            continue
        count += 1
        if count > _LINES:
            return
        edit = GoldenEdit(tuple(Action(a, RESULT, do(full_runs.out, index=b)) for a, b in pairs))
        looked_up = key[0] in _LOOKS_UP
        text = f"{calls[pairs[0][0]].expression} " + (
            "continues past the sequence's end" if turns else "is taken at the padded end"
        )
        cause, also = ("invalid_index", ("wrong_mask", "off_by_one")) if looked_up else (
            "wrong_mask", ("off_by_one", "invalid_index"))  # fmt: skip
        yield NamedEdit(cause, f"{text}: for this line {how}", edit, 0.55 - 0.05 * (not turns), also=also,
                        before=full_runs.run)  # fmt: skip


def _by_line(calls: Sequence[Node]) -> dict[tuple[str, str], list[Node]]:
    lines: dict[tuple[str, str], list[Node]] = {}
    for call in calls:
        computed = call.owns or call.name in _LOOKS_UP
        if computed and call.line and not call.backward and floating(call.out):
            lines.setdefault((call.name, call.line), []).append(call)
    return lines


def _pairs(
    mine: Sequence[Node],
    theirs: Sequence[Node],
    calls: Sequence[Node],
    other: Sequence[Node],
) -> tuple[Pairs, bool]:
    """Pairs of a line's operators in both runs: all if the counts are equal, otherwise the last of each loop."""
    turns = len(mine) != len(theirs)
    a, b = (_ends(calls, mine), _ends(other, theirs)) if turns else (mine, theirs)
    if len(a) != len(b):
        return [], turns
    return [(x.index, y.index) for x, y in zip(a, b, strict=True) if x.out.shape == y.out.shape], turns


def _ends(calls: Sequence[Node], line: Sequence[Node]) -> list[Node]:
    """The line's operators in the last iteration of each loop: those that no other operator of the line reads."""
    read: set[int] = set()
    own = {call.index for call in line}
    for call in line:
        read |= _before(calls, call) & own
    return [call for call in line if call.index not in read]


def _before(calls: Sequence[Node], call: Node) -> set[int]:
    """The nearest operators of the same line on which `call` depends."""
    nearest: set[int] = set()
    seen: set[int] = set()
    waiting = list(call.read)
    while waiting:
        key = waiting.pop()
        maker = maker_of(calls, key)
        if maker is None or maker.index in seen:
            continue
        seen.add(maker.index)
        if (maker.name, maker.line) == (call.name, call.line):
            nearest.add(maker.index)
        else:
            waiting += maker.read
    return nearest
