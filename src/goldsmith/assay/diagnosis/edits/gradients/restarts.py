"""Loops whose backward recomputes each chunk from a saved state, and takes the state of another chunk.

Kernels save only the state at the beginning of each chunk. If it was saved too late, or another chunk's state is read,
all states of the chunk are recomputed from the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...graph.graph import Graph
from ...graph.node import Key, Node
from ...graph.tensors import floating
from ..golden_edit import RESULT, Action, GoldenEdit, NamedEdit, do
from ..primitives.tensors import copy_of
from .blocks import BLOCKS

_LEAST = 3  # iterations
_KINDS = 6
_Reader = tuple[Node, int, Key]  # the reader of the previous iteration's state, its argument, and that state


def edits(graph: Graph) -> Iterator[NamedEdit]:
    for _, (states, readers) in zip(range(_KINDS), _loops(graph), strict=False):
        n = len(states)
        for chunk in (c for c in BLOCKS if c <= n):
            for step, which in ((1, "the next one"), (-1, "the previous one")):
                begun, again = [], []
                for at in range(0 if step > 0 else 2 * chunk, n, chunk):
                    other = (("other", states[min(at + step * chunk, n) - 1].index),)
                    for node, i, key in readers[at]:
                        again.append(Action(node.index, i, do(copy_of), other))
                        begun.append(Action(key, RESULT, do(copy_of), other))
                text = f"the backward starts each chunk of {chunk} steps from the state of another chunk, {which}"
                for actions in (again, again + begun) if again else ():
                    # `drawn`, because the other operands of a step that is run again are those of this draw
                    edit = GoldenEdit(tuple(actions), backward_only=True, follow_all=True)
                    yield NamedEdit("wrong_saved_tensor", text, edit, 0.56, {"chunk": chunk, "step": step},
                                    ("shifted", "off_by_one"), drawn=True)  # fmt: skip


def _loops(graph: Graph) -> Iterator[tuple[Sequence[Node], Mapping[int, list[_Reader]]]]:
    """(results of each iteration, readers of the previous iteration's) of the loops of the forward."""
    lines: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if not node.backward and node.owns and node.line and floating(node.out) and node.out.numel() > 1:
            lines.setdefault((node.name, node.line, node.out.shape), []).append(node)
    place = {node.index: (kind, j) for kind, members in lines.items() for j, node in enumerate(members)}
    for states in lines.values():
        if len(states) < _LEAST:
            continue
        turn_of: dict[Key, int] = {node.index: j for j, node in enumerate(states)}
        loops: dict[tuple, dict[int, _Reader]] = {}
        for node, i, key, a in graph.operands():
            kind, turn = place.get(node.index, ((), -1))
            if a.shape == states[0].out.shape and turn >= 0 and len(lines[kind]) == len(states):
                if turn == 0 or turn_of.get(key, -1) == turn - 1:
                    loops.setdefault((kind, i), {})[turn] = node, i, key
        whole = [turns for turns in loops.values() if len(turns) == len(states)]  # each iteration has a reader
        if whole:
            yield states, {turn: [turns[turn] for turns in whole] for turn in range(len(states))}
