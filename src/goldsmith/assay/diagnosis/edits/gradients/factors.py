"""Wrong factors in one addend of a gradient: a forward value is left out there, or multiplied in once more.

Kernels group the factors of a gradient differently from autograd. For example x_hat is one factor in a kernel and
several in autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from typing import NamedTuple

import torch
from torch import Tensor

from ...graph.graph import Graph
from ...graph.loops import signature
from ...graph.node import Key, Node
from ...graph.tensors import floating
from ..golden_edit import RESULT, Action, GoldenEdit, NamedEdit, Source, do
from ..primitives.formulas import applied
from ..primitives.tensors import multiply, multiply_columns

_SUMS = frozenset("add add_ sub sub_".split())
_PRODUCTS = frozenset("mul mm bmm mv".split())
_PLACING = frozenset("select_backward slice_backward neg expand unsqueeze_copy sum".split())
_ADDENDS, _FACTORS, _ROWS = 12, 24, 4


class ForwardOperand(NamedTuple):
    """A tensor of the forward, as an operator reads it."""

    name: str
    tensor: Tensor
    source: Source


def edits(graph: Graph) -> Iterator[NamedEdit]:
    backward = [n for n in graph.nodes if n.backward and n.index in graph.behind]
    yield from _left_out(graph, backward)
    yield from _of_each_addend(graph, backward)
    addends: dict[int, Node] = {}
    for node in backward:
        for key in node.makers[:2] if node.name in _SUMS else ():
            maker = _maker(graph, key)
            if maker is not None and floating(maker.out) and maker.out.numel() > 1:
                addends.setdefault(maker.index, maker)
    factors = forward_operands(graph)
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


def _of_each_addend(graph: Graph, backward: list[Node]) -> Iterator[NamedEdit]:
    """The addends of a product have a row of the forward, its inverse, or a product or quotient of two once more."""
    operands = [f for f in forward_operands(graph) if f.name != "an intermediate"]
    products = [n for n in backward if n.name in ("mm", "bmm") and floating(n.args[0]) and n.args[0].shape[-1] > 1]
    for node in products[:_ADDENDS]:
        n = node.args[0].shape[-1]
        rows = [f for f in operands if f.tensor.numel() == n and not bool((f.tensor == 0).any())][:_ROWS]
        once = [((f, inverse),) for f in rows for inverse in (False, True)]
        twice = [((f, False), (g, False)) for f, g in combinations(rows, 2)]
        for factors in [*once, *twice, *(((f, False), (g, True)) for f, g in permutations(rows, 2))]:
            name = "".join(("/" if inverse else " * ") + f.name for f, inverse in factors)
            name = f"1{name}" if name[0] == "/" else name[3:]
            actions = tuple(
                Action(node.index, 0, do(multiply_columns, inverse=inverse), (("by", f.source),))
                for f, inverse in factors
            )
            text = f"each addend of {node.expression} has a wrong factor of its own, {name}"
            yield NamedEdit("wrong_factor", text, GoldenEdit(actions, node.line), 0.5,
                            {"factor": name, "named": name}, ("repeated_term",))  # fmt: skip


def _left_out(graph: Graph, backward: list[Node]) -> Iterator[NamedEdit]:
    """One of the paths contributes nothing, in every iteration of a loop."""
    ways: dict[tuple, dict[int, Node]] = {}
    for node in backward:
        for i, key in enumerate(node.makers[:2] if node.name in _SUMS else ()):
            maker = _maker(graph, key)
            if maker is not None and floating(maker.out):
                ways.setdefault((node.line, node.name, i, maker.name, maker.line), {})[maker.index] = maker
                ways.setdefault((maker.name, maker.line), {})[maker.index] = maker
                ways.setdefault((maker.name, *signature(graph.nodes, _source(graph, maker))), {})[maker.index] = maker
        if node.name in _PRODUCTS and node.owns and floating(node.out):
            ways.setdefault(signature(graph.nodes, node), {})[node.index] = node
    for at in dict.fromkeys(tuple(sorted(members)) for members in ways.values()):
        first = graph.nodes[at[0]]
        often = f", in {len(at)} places" if len(at) > 1 else ""
        zero = do(applied, of=torch.zeros_like)
        edit = GoldenEdit(tuple(Action(index, RESULT, zero) for index in at), first.line)
        yield NamedEdit("missing_term", f"nothing comes through {first.expression}{often}", edit,
                        0.55 if first.name in _PRODUCTS else 0.6, {"term": first.expression})  # fmt: skip


def _source(graph: Graph, node: Node) -> Node:
    """The gradient before it is scattered into a larger one (select, slice, expand)."""
    while node.name in _PLACING and node.makers:
        before = _maker(graph, node.makers[0])
        if before is None:
            break
        node = before
    return node


def _maker(graph: Graph, key: Key) -> Node | None:
    maker = graph.maker(key)
    return maker if maker is not None and maker.backward and maker.owns else None


def forward_operands(graph: Graph) -> list[ForwardOperand]:
    """The forward's inputs and results with several elements; the latest tensor of a name wins."""
    tensors: dict[Key, ForwardOperand] = {}
    for node, i, key, tensor in graph.operands():
        if not node.backward and not str(key).startswith("grad_"):
            maker = graph.maker(key)
            as_made = not tensor._is_view() if maker is None else maker.out.stride() == tensor.stride()
            source = key if as_made and (maker is None or maker.out.shape == tensor.shape) else (node.index, i)
            tensors[key] = ForwardOperand(node.operand(i) or "an intermediate", tensor, source)
    return list(tensors.values())[:_FACTORS]


def _broadcasts(factor: Tensor, addend: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(factor.shape, addend.shape) == addend.shape
    except RuntimeError:
        return False
