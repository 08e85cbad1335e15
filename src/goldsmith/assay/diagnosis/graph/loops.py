"""Operators of a loop: which ones are the same operator in other iterations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .node import Node, maker_of

_TURNS = 4  # iterations of a loop, at least
_PLACED = frozenset("select slice narrow".split())  # their arguments differ from iteration to iteration


def turning(nodes: Sequence[Node]) -> set[int]:
    """The operators of a loop: those whose line has several equal ones."""
    lines: dict[tuple, list[int]] = {}
    for node in nodes:
        if node.line:
            lines.setdefault(_reading(node), []).append(node.index)
    return {i for members in lines.values() if len(members) >= _TURNS for i in members}


def _reading(node: Node) -> tuple:
    """Name, line, and the shapes of the tensors it reads."""
    shapes = tuple(tuple(a.shape) for a in node.tensors)
    return node.name, node.line, node.backward, shapes


def signature(nodes: Sequence[Node], node: Node) -> tuple:
    """The same, with the operators that made those tensors; for other arguments, the value."""
    makers = []
    for key in node.makers:
        maker = maker_of(nodes, key)
        source = str(key) if maker is None else f"{maker.name} {maker.line}"
        sent = source.startswith("grad_") if maker is None else maker.backward
        makers.append("a gradient" if sent else source)  # the last iteration gets its gradient from elsewhere
    rest = tuple(str(a) for a in node.args if not isinstance(a, Tensor))
    return (*_reading(node), tuple(makers), rest if node.name not in _PLACED else ())
