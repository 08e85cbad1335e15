"""A gradient that passes through an elementwise function unchanged: the function's derivative is dropped."""

from __future__ import annotations

from collections.abc import Iterator

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import RESULT, Action, GoldenEdit, NamedEdit, do
from ..primitives.tensors import copy_of

_MOST = 8  # incoming gradients that may have passed through, per result
_ALIASES = ("detach", "alias")


def edits(graph: Graph) -> Iterator[NamedEdit]:
    """The last of the backward's elementwise steps returns the input of an earlier one of them."""
    known: dict[int, Node] = {}  # operators that make gradients
    read: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for key in node.makers:
            if isinstance(key, int):
                read.setdefault(key, []).append(node)
        sent = any(key in known or str(key).startswith("grad_") for key in node.makers)
        if node.backward and sent and floating(node.out) and node.out.numel() > 1 and node.name not in _ALIASES:
            known[node.index] = node
    for node in known.values():
        readers = read.get(node.index, [])
        if readers and all(_on_elements(node, reader) for reader in readers):
            continue
        before = _before(node, known)
        for by in before if len(before) <= _MOST else (*before[: _MOST // 2], *before[-_MOST // 2 :]):
            text = f"{by.expression} passes on in place of {node.expression}: a slope is dropped"
            edit = GoldenEdit((Action(node.index, RESULT, do(copy_of), (("other", by.index),)),), node.line)
            yield NamedEdit("wrong_factor", text, edit, 0.55, {"factor": "slope"})


def _on_elements(node: Node, reader: Node) -> bool:
    same = floating(reader.out) and reader.out.shape == node.out.shape
    return same and reader.name not in _ALIASES


def _before(node: Node, known: dict[int, Node]) -> list[Node]:
    """The gradients of its shape that it depends on, the earliest first."""
    gradients: dict[int, Node] = {}
    waiting = [node]
    while waiting:
        for key in waiting.pop().makers:
            before = known.get(key) if isinstance(key, int) else None
            if before is not None and before.index not in gradients and before.out.shape == node.out.shape:
                gradients[before.index] = before
                waiting.append(before)
    return [gradients[index] for index in sorted(gradients)]
