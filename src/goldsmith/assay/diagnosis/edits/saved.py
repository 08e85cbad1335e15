"""Tensors that the backward reads wrongly while the forward is right: another one, other rows, other strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph.graph import Graph, Place
from ..graph.node import Key, Node
from ..graph.tensors import floating, whole
from .golden_edit import RESULT, Action, GoldenEdit, NamedEdit, Primitive, do, named
from .primitives import positions as p
from .primitives.tensors import exchange_strides

_READ, _MOVED, _ORDERS = 24, 12, 6  # at most
_READERS = 4  # readers of one tensor that are tried one by one
_COPIES = frozenset("index_select index gather clone _to_copy contiguous masked_fill embedding".split())


def edits(graph: Graph, handed: Sequence[str]) -> Iterator[NamedEdit]:
    """handed: names of the tensors that the candidate's forward hands to its backward."""
    yield from _other_tensors(graph, handed)
    for key, (name, places) in list(graph.saved.items())[:_MOVED]:
        first = places[0][0].args[places[0][1]]
        for axis, n in enumerate(first.shape) if first.is_contiguous() else ():
            yield from _other_rows(key, name, places, axis, n)
    yield from _by_columns(graph)
    for node in graph.nodes:
        if not node.backward and node.name == "_softmax" and floating(node.out) and node.index in graph.read_back:
            text = f"the backward reads {node.expression} as it was before it was divided by its total"
            undivided = do(less_total, dim=int(node.args[1]))
            yield backward((node.index,), "wrong_saved_tensor", 0.48, text, undivided,
                           ("missing_rescale", "wrong_factor"), saved=node.expression)  # fmt: skip


def backward(
    keys: Sequence[Key], cause: str, prior: float, text: str, primitive: Primitive, also: tuple[str, ...] = (),
    reads: tuple[tuple[str, Key], ...] = (), drawn: bool = False, follow_all: bool = False, **params: Any,
) -> NamedEdit:  # fmt: skip
    """The same edit of several tensors, which the backward alone reads."""
    actions = tuple(Action(key, RESULT, primitive, reads) for key in keys)
    return NamedEdit(
        cause, text, GoldenEdit(actions, backward_only=True, follow_all=follow_all), prior, params, also, drawn=drawn
    )


def less_total(p: Tensor, *, dim: int) -> Tensor:
    """exp(x - max x) in place of a softmax, which divides that by its sum."""
    return p / p.amax(dim, keepdim=True)


def read_other(x: Tensor, other: Tensor) -> Tensor:
    return other.reshape(x.shape)


def by_rows(x: Tensor, *, order: tuple[int, ...]) -> Tensor:
    return x.index_select(0, torch.tensor(order, device=x.device))


def _other_tensors(graph: Graph, handed: Sequence[str]) -> Iterator[NamedEdit]:
    """Another tensor of the same shape; or the rows of tensors in another order."""
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
    kept = {k: n for k, n in {**forward, **read}.items() if n in handed and shapes[k]}
    for n in sorted({shapes[k][0] for k in read if shapes[k] and shapes[k][0] > 2}):
        together = tuple(k for k in kept if shapes[k][0] == n)
        alone = [(k,) for k in read if shapes[k] and shapes[k][0] == n][:_READ]
        for how, order in _orders(graph, n):
            for keys, prior in (*(((together, 0.6),) if together else ()), *((one, 0.5) for one in alone)):
                names = ", ".join({**kept, **read}[k] for k in keys)
                text = f"the backward reads the rows of {names} {how}"
                back = order == tuple(reversed(range(n)))
                rows = do(p.reverse, axis=0) if back else do(by_rows, order=order)
                yield backward(
                    keys, "permuted", prior, text, rows, drawn=not back, follow_all=True, saved=names, axis=0
                )


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


def _orders(graph: Graph, n: int) -> list[tuple[str, tuple[int, ...]]]:
    """The orders of n rows that the golden uses, their inverses, and the reverse order."""
    orders: dict[tuple[int, ...], str] = {}
    for node in graph.nodes:
        for out in node.out if isinstance(node.out, list | tuple) else (node.out,):
            if whole(out) and out.dim() == 1 and len(out) == n and len(orders) < _ORDERS:
                index = out.long()
                if torch.equal(index.sort().values, torch.arange(n, device=index.device)):
                    orders.setdefault(tuple(index.tolist()), f"in the order of {node.expression}")
                    orders.setdefault(tuple(index.argsort().tolist()), f"in the order that {node.expression} undoes")
    orders.setdefault(tuple(reversed(range(n))), "in reverse order")
    return [(how, order) for order, how in orders.items() if order != tuple(range(n))]


def _other_rows(key: Key, name: str, places: list[Place], axis: int, n: int) -> Iterator[NamedEdit]:
    """A value computed for one place and read at another: a neighbour's, or the first one's."""
    moves: list[tuple[str, str, Primitive, tuple[str, ...], float]] = []
    for step in (1, -1) if n > 2 else ():
        where = f"of the {'previous' if step > 0 else 'next'} position along axis {axis}"
        for edge, how, rarer in (("own", "its own at the end", 0.0), ("around", "wrapping around", 0.01)):
            move = do(p.shift, axis=axis, step=step, edge=edge)
            moves.append(("shifted", f"{where}, {how}", move, ("off_by_one",) if edge == "own" else (), rarer))
    if n > 1:
        first = do(p.reindex, axis=axis, rule="first")
        text = f"of the first position along axis {axis} for all"
        moves.append(("wrong_stride", text, first, ("invalid_index", "wrong_factor"), 0.0))
    shape = places[0][0].args[places[0][1]].shape
    for cause, how, move, also, rarer in moves:
        also = (*also, "wrong_saved_tensor")
        text = f"the backward reads {name} {how}"
        yield backward((key,), cause, 0.46 - rarer, text, move, also, saved=name, axis=axis)
        for node, i in places if 1 < len(places) <= _READERS else ():
            if node.args[i].shape == shape:
                text = f"{node.expression} in the backward reads {name} {how}"
                yield named(node, cause, 0.42 - rarer, text, (i, move), also=also, saved=name, axis=axis)


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
