"""One reader of a tensor, or the readers of one line in all turns, that read another tensor of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..graph.graph import Graph
from ..graph.node import Node
from ..graph.tensors import floating, masks
from .golden_edit import Action, GoldenEdit, NamedEdit, do, named
from .primitives.formulas import applied
from .primitives.tensors import read_other

_READS = 400  # edits, at most
_NEVER = frozenset("detach alias clone copy_ view expand t transpose permute unsqueeze squeeze".split())


def edits(graph: Graph, stages: Mapping[str, Tensor]) -> Iterator[NamedEdit]:
    """stages: inputs and stages of the forward, by name."""
    reads = (edit for node in graph.nodes for edit in _other_operands(graph, node, stages))
    yield from (edit for _, edit in zip(range(_READS), reads, strict=False))


def _other_operands(graph: Graph, node: Node, stages: Mapping[str, Tensor]) -> Iterator[NamedEdit]:
    """A forward operator that reads another tensor of the same shape: an input, a stage, or no mask."""
    if node.backward or node.index not in graph.behind or node.name in _NEVER:
        return
    for i, a in enumerate(node.args):
        if not floating(a) or a.numel() < 2:
            continue
        mine = node.operand(i)
        if masks(a):
            text = f"{mine or 'a mask'} is not applied where {node.expression} reads it"
            yield named(
                node,
                "wrong_mask",
                0.5,
                text,
                (i, do(applied, of=torch.ones_like)),
                also=("wrong_factor",),
                operand=mine,
            )
        for name, other in stages.items():
            key = graph.named.get(name)
            # no kernel reads what is made later: most of it is made from this operator's result
            later = isinstance(key, int) and key >= node.index
            if name != mine and other.shape == a.shape and other.dtype == a.dtype and key is not None and not later:
                text = f"{node.expression} reads {name} in place of {mine or 'an operand'}"
                edit = GoldenEdit((Action(node.index, i, do(read_other), (("other", key),)),), node.line)
                params = {"operand": mine, "exchanged": [mine, name], "factor": name, "named": name}
                yield NamedEdit("wrong_saved_tensor", text, edit, 0.33, params, ("swapped_results", "stale_state"))
