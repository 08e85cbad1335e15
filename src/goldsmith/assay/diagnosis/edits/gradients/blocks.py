"""Backward sums that a kernel takes in small blocks, per sequence, or in a loop.

One block replaces the others, the last block is left out, or a block reads its weights without transposing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import Action, GoldenEdit, NamedEdit, do, named
from ..primitives.spans import Span
from ..primitives.tensors import restrict, transpose_blocks
from ..reductions import one_axis

BLOCKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)
_PRODUCTS = {"mm": 1, "bmm": 2, "mv": 1}  # operator -> the axis of the first operand that it sums over
_MOST = 128  # operators of one line
# (cause, text, rule of the part that is left, other causes, subtracted from the prior)
_PARTS = (
    ("overwritten_accumulator", "the last one alone is left", "last block", ("truncated_reduction", "lost_update"), 0),
    ("truncated_reduction", "the first one alone is left", "first block",
     ("overwritten_accumulator", "missing_term"), 0.01),
    ("truncated_reduction", "the last is left out", "without last block", ("off_by_one", "missing_term"), 0.01),
    ("truncated_reduction", "the first is left out", "without first block", ("off_by_one", "missing_term"), 0.02),
)  # fmt: skip


def edits(graph: Graph) -> Iterator[NamedEdit]:
    alike: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        sums = node.name in _PRODUCTS or node.name == "sum" and one_axis(node) is not None
        if node.backward and node.index in graph.behind and sums and all(map(floating, node.tensors)):
            makers = [
                (m.name, m.line, m.backward) if m is not None else k for k in node.makers for m in [graph.maker(k)]
            ]
            alike.setdefault((node.name, node.line, *makers), []).append(node)
    for members in alike.values():
        if len(members) <= _MOST:
            yield from _cut(members)
        if len(members) == 1 and members[0].name in ("mm", "bmm"):
            yield from _turned(members[0])


def _summed(node: Node) -> int:
    return _PRODUCTS[node.name] if node.name in _PRODUCTS else one_axis(node) or 0


def _cut(members: Sequence[Node]) -> Iterator[NamedEdit]:
    longest = max(node.args[0].shape[_summed(node)] for node in members)
    often = f", in {len(members)} places" if len(members) > 1 else ""
    for block in (b for b in BLOCKS if b < longest):
        for cause, how, rule, also, rarer in _PARTS:
            actions = tuple(
                Action(node.index, 0, do(restrict, axis=_summed(node), span=Span(rule, block))) for node in members
            )
            text = f"{members[0].expression}: of its blocks of {block} {how}{often}"
            yield NamedEdit(cause, text, GoldenEdit(actions, members[0].line), 0.5 - rarer,
                            {"block": block, "axis": _summed(members[0])}, also)  # fmt: skip


def _turned(node: Node) -> Iterator[NamedEdit]:
    """Each diagonal block of a square operand is read transposed."""
    for i, x in enumerate(node.tensors[:2]):
        n = x.shape[-1]
        for block in BLOCKS if x.shape[-2] == n > 2 and not torch.equal(x, x.mT) else ():
            if block < n:
                text = f"within blocks of {block} {node.expression} reads {node.operand(i) or 'an operand'} transposed"
                turned = i, do(transpose_blocks, block=block)
                yield named(node, "transposed", 0.5, text, turned, operand=i, block=block)
