"""Tensors that the backward reads wrongly while the forward is right: another one, or in other strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph.graph import Graph
from ..graph.node import Key, Node
from ..graph.tensors import floating
from .golden_edit import RESULT, Action, GoldenEdit, NamedEdit, Primitive, do
from .primitives.tensors import exchange_strides, read_other

_READ = 24  # at most
_COPIES = frozenset("index_select index gather clone _to_copy contiguous masked_fill embedding".split())
THROUGH = _COPIES | {"tril", "triu", "detach", "alias"}  # operators that copy a tensor or take rows of it


def edits(graph: Graph) -> Iterator[NamedEdit]:
    yield from _other_tensors(graph)
    yield from _by_columns(graph)
    for node in graph.nodes:
        if not node.backward and node.name == "_softmax" and floating(node.out) and node.index in graph.read_back:
            text = f"the backward reads {node.expression} as it was before it was divided by its total"
            undivided = do(less_total, dim=int(node.args[1]))
            yield backward((node.index,), "wrong_saved_tensor", 0.48, text, undivided,
                           ("missing_rescale", "wrong_factor"), saved=node.expression)  # fmt: skip


def backward(
    keys: Sequence[Key], cause: str, prior: float, text: str, primitive: Primitive, also: tuple[str, ...] = (),
    reads: tuple[tuple[str, Key], ...] = (), **params: Any,
) -> NamedEdit:  # fmt: skip
    """The same edit of several tensors, which the backward alone reads."""
    actions = tuple(Action(key, RESULT, primitive, reads) for key in keys)
    return NamedEdit(cause, text, GoldenEdit(actions, backward_only=True), prior, params, also)


def less_total(p: Tensor, *, dim: int) -> Tensor:
    """exp(x - max x) in place of a softmax, which divides that by its sum."""
    return p / p.amax(dim, keepdim=True)


def _other_tensors(graph: Graph) -> Iterator[NamedEdit]:
    """Another tensor of the same shape."""
    forward: dict[Key, str] = {}
    shapes: dict[Key, tuple[int, ...]] = {}
    read: dict[Key, str] = {}
    for node in graph.nodes:
        for key, name, tensor in zip(node.makers, node.operands, node.tensors, strict=True):
            if not floating(tensor) or tensor.numel() < 2 or key == -1:
                continue
            if not node.backward:
                forward[key], shapes[key] = name, tuple(tensor.shape)
            elif key in forward:
                read.setdefault(key, name)
        if not node.backward and floating(node.out) and node.out.numel() > 1:
            forward.setdefault(node.index, node.expression)
            shapes.setdefault(node.index, tuple(node.out.shape))
    sources: dict[Key, str] = {}  # the tensors that the read ones are copies, or rows, of
    for key in read:
        maker = graph.maker(key)
        while maker is not None and maker.name in _COPIES and maker.makers:
            key = maker.makers[0]
            if key in forward:
                sources.setdefault(key, forward[key])
            maker = graph.maker(key)
    for key, name in list({**sources, **read}.items())[:_READ]:
        for by in [k for k in forward if k != key and shapes[k] == shapes[key]][:_READ]:
            cause, params, also = _left_out(graph.maker(key), graph.maker(by), key, by)
            text = f"the backward reads {forward[by]} in place of {name}"
            yield backward((key,), cause, 0.5, text, do(read_other), also, (("other", by),), saved=name,
                           by=forward[by], **params)  # fmt: skip


def _left_out(maker: Node | None, other: Node | None, key: Key, by: Key) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """(cause, params, other causes): an operand in place of its product or sum is a factor, or a term, left out."""
    if maker is not None and by in maker.makers and len(maker.operands) == 2:
        name = maker.operands[1 - maker.makers.index(by)] or "the other"
        if maker.name in ("mul", "div"):
            return "wrong_factor", {"factor": name, "named": f"1/{name}"}, ()
        if maker.name in ("add", "sub"):
            return "missing_term", {"term": name}, ()
    if other is not None and key in other.makers and other.name in ("mul", "div"):  # a product in place of its factor
        return "wrong_factor", {"factor": other.expression}, ("wrong_saved_tensor",)
    return "wrong_saved_tensor", {}, ()


def _by_columns(graph: Graph) -> Iterator[NamedEdit]:
    """A matrix read by its columns."""
    matrices: dict[Key, tuple[str, Tensor]] = {}
    for node, i, key, t in graph.operands():
        lying = t.numel() * t.element_size() == t.untyped_storage().nbytes()
        if key in graph.read_back and not node.backward and t.dim() > 1 and t.is_contiguous() and lying:
            matrices.setdefault(key, (node.operand(i) or "an intermediate", t))
    for key, (name, t) in list(matrices.items())[:_READ]:
        square = t.shape[-1] == t.shape[-2]
        if min(t.shape[-2:]) > 1 and not (square and torch.equal(t, t.mT)):
            cause, also = ("transposed", ("wrong_stride",)) if square else ("wrong_stride", ("transposed",))
            text = f"the backward reads {name} by its columns, not by its rows"
            # rows and columns of different lengths are rarely confused, so other edits come first
            yield backward((key,), cause, 0.5 if square else 0.45, text, do(exchange_strides), also, saved=name)
