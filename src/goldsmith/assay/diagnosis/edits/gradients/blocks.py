"""Backward products in which each block of an operand is read without transposing it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...graph.graph import Graph
from ...graph.tensors import floating
from ..golden_edit import NamedEdit, do, named
from ..primitives.tensors import transpose_blocks

BLOCKS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)


def edits(graph: Graph) -> Iterator[NamedEdit]:
    """Each diagonal block of a square operand is read transposed."""
    products = [n for n in graph.nodes if n.backward and n.index in graph.behind and n.name in ("mm", "bmm")]
    for node in products:
        for i, x in enumerate(node.tensors[:2]):
            n = x.shape[-1]
            for block in BLOCKS if floating(x) and x.shape[-2] == n > 2 and not torch.equal(x, x.mT) else ():
                if block < n:
                    text = f"within blocks of {block} {node.expression} reads {node.operand(i) or 'an operand'} "
                    turned = i, do(transpose_blocks, block=block)
                    yield named(node, "transposed", 0.5, f"{text}transposed", turned, operand=i, block=block)
