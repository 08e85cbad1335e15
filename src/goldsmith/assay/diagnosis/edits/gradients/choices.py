"""Backward branches that differ from the forward: the whole gradient goes to one side of a min or max.

min(r A, clip(r) A) has no gradient where the clipped side is taken and r is outside its limits. A kernel that only
tests whether r is within its limits always takes the gradient of one side, whichever is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...graph.graph import Graph
from ...graph.node import Key, Node
from ..golden_edit import CALL, Action, GoldenEdit, NamedEdit, do
from ..primitives.formulas import function, unchanged
from ..primitives.masks import keep_operand

_CHOICES = frozenset("minimum maximum".split())
_MASKS = frozenset("gt lt ge le".split())
_MOST = 64


def edits(graph: Graph) -> Iterator[NamedEdit]:
    """The choices of one source line change together in all iterations."""
    lines: dict[str, list[tuple[Node, list[Node | None]]]] = {}
    for node in graph.nodes:
        if node.backward or node.name not in _CHOICES or len(node.makers) != 2:
            continue
        sides = _sides(graph, node)
        if any(s is not None and s.index in graph.behind for s in sides):
            lines.setdefault(node.line or str(node.index), []).append((node, sides))
    for members in lines.values():
        for always in (0, 1) if len(members) <= _MOST else ():
            actions: list[Action] = []
            for _, both in members:
                for i, side in enumerate(both):
                    if side is not None and i == always:
                        actions += _whole(graph, side)
                    elif side is not None:
                        actions.append(Action(side.index, CALL, do(function, of=torch.zeros_like)))
            node = members[0][0]
            name = node.operand(always) or ("the first", "the second")[always]
            text = f"in the backward {node.expression} always takes {name}, whichever the forward took"
            if actions:
                yield NamedEdit("wrong_decision", text, GoldenEdit(tuple(actions), node.line), 0.6, {"operand": name},
                                ("wrong_mask", "wrong_saved_tensor"))  # fmt: skip


def _sides(graph: Graph, choice: Node) -> list[Node | None]:
    """The operators that hide the gradient where the other operand is taken, for the first and the second operand."""
    sides: list[Node | None] = [None, None]
    masks: dict[Key, Node] = {
        n.index: n for n in graph.nodes if n.backward and n.name in _MASKS and n.makers == choice.makers
    }
    for node in graph.nodes:
        hides = node.backward and node.name.rstrip("_") == "masked_fill" and len(node.makers) > 1
        mask = masks.get(node.makers[1]) if hides else None
        if mask is not None:
            first = (mask.name in ("gt", "ge")) == (choice.name == "minimum")  # hidden where the first one is larger
            sides[0 if first else 1] = node
    return sides


def _whole(graph: Graph, side: Node) -> Iterator[Action]:
    """The whole gradient that reaches the choice; autograd halves it first where both operands are equal."""
    halved = graph.maker(side.makers[0])
    if halved is not None and halved.name == "where":
        yield Action(halved.index, CALL, do(keep_operand, at=2))
    yield Action(side.index, CALL, do(unchanged))
