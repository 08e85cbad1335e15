"""Wrong factors in one addend of a gradient: a forward value is left out there, or multiplied in once more.

Kernels group the factors of a gradient differently from autograd. For example x_hat is one factor in a kernel and
several in autograd.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...graph.graph import Graph
from ...graph.node import Key, Node
from ...graph.tensors import floating
from ..golden_edit import RESULT, Action, GoldenEdit, NamedEdit, Source, do
from ..primitives.tensors import multiply

_SUMS = frozenset("add add_ sub sub_".split())
_ADDENDS, _FACTORS, _ROWS = 12, 24, 4


def edits(graph: Graph) -> Iterator[NamedEdit]:
    backward = [n for n in graph.nodes if n.backward and n.index in graph.behind]
    addends: dict[int, Node] = {}
    for node in backward:
        for key in node.makers[:2] if node.name in _SUMS else ():
            maker = _maker(graph, key)
            if maker is not None and floating(maker.out) and maker.out.numel() > 1:
                addends.setdefault(maker.index, maker)
    factors = _forward_operands(graph)
    for addend in list(addends.values())[:_ADDENDS]:
        for name, tensor, source in factors:
            alike = tensor.numel() == addend.out.numel() and addend.out.is_contiguous()
            if not (alike or _broadcasts(tensor, addend.out)) or bool((tensor == 0).any()):
                continue
            for inverse, how, called in ((True, "is left out of", f"1/{name}"), (False, "enters", name)):
                text = f"{name} {how} the addend {addend.expression}" + ("" if inverse else " once more")
                action = Action(addend.index, RESULT, do(multiply, inverse=inverse), (("by", source),))
                yield NamedEdit("wrong_factor", text, GoldenEdit((action,), addend.line), 0.5,
                                {"factor": name, "named": called})  # fmt: skip


def _maker(graph: Graph, key: Key) -> Node | None:
    maker = graph.maker(key)
    return maker if maker is not None and maker.backward and maker.owns else None


def _forward_operands(graph: Graph) -> list[tuple[str, Tensor, Source]]:
    """(name, tensor, place) of the forward's inputs and results with several elements, as an operator reads them."""
    tensors: dict[Key, tuple[str, Tensor, Source]] = {}
    for node, i, key, tensor in graph.operands():
        if not node.backward and not str(key).startswith("grad_"):
            maker = graph.maker(key)
            as_made = not tensor._is_view() if maker is None else maker.out.stride() == tensor.stride()
            source = key if as_made and (maker is None or maker.out.shape == tensor.shape) else (node.index, i)
            tensors[key] = (node.operand(i) or "an intermediate", tensor, source)
    return list(tensors.values())[:_FACTORS]


def _broadcasts(factor: Tensor, addend: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(factor.shape, addend.shape) == addend.shape
    except RuntimeError:
        return False
