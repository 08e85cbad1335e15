"""One reader of a tensor, or the readers of one line in all turns, that read another tensor of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..graph.graph import Graph
from ..graph.node import Key, Node
from ..graph.tensors import floating, masks, seen_through, whole
from .golden_edit import CALL, Action, GoldenEdit, NamedEdit, OperatorCall, do, named
from .primitives.formulas import ones

_TURNS = (2, 1024)  # iterations of a loop
_STALE, _UPDATED, _OTHERS, _READS = 200, 200, 6, 400  # edits, at most
_STEPS = frozenset("mul div add sub addcmul lerp neg tanh sigmoid exp".split())
_READING = frozenset("mul div add sub addcmul lerp mm bmm addmm where pow square exp".split())
_ALIASES = frozenset("detach alias clone".split())
_NEVER = frozenset("detach alias clone copy_ view expand t transpose permute unsqueeze squeeze".split())
_Pair = tuple[Node, int, Node, int]  # maker, its operand; reader, its argument


def edits(graph: Graph, stages: Mapping[str, Tensor]) -> Iterator[NamedEdit]:
    """stages: inputs and stages of the forward, by name."""
    reads = (edit for node in graph.nodes for edit in _other_operands(graph, node, stages))
    yield from (edit for _, edit in zip(range(_READS), reads, strict=False))
    yield from _stale(graph)
    yield from _updated(graph)
    yield from _unscaled(graph)


def take(x: Tensor, other: Tensor) -> Tensor:
    return other


def see(x: Tensor, other: Tensor, like: Tensor | None = None) -> Tensor:
    """Another tensor through the view by which x reads its own."""
    new = other if like is None else torch.empty_like(like).copy_(other)
    seen = seen_through(new, x)
    if seen is None:
        raise RuntimeError("read through a view of another size")
    return seen


def scale_part(
    call: OperatorCall, p: Tensor, q: Tensor, whole: Tensor, *, operand: int, scaled: int, sign: float
) -> Tensor:
    """a c + b in place of (a + b) c."""
    part = torch.empty_like(whole).copy_(p if scaled == 0 else sign * q)
    before, after = (see(call.args[operand], t) for t in (part, whole - part))
    return call.on(*(before if i == operand else a for i, a in enumerate(call.args))) + after


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
            yield named(node, "wrong_mask", 0.5, text, (i, do(ones)), also=("wrong_factor",), operand=mine)
        for name, other in stages.items():
            key = graph.named.get(name)
            # no kernel reads what is made later: most of it is made from this operator's result
            later = isinstance(key, int) and key >= node.index
            if name != mine and other.shape == a.shape and other.dtype == a.dtype and key is not None and not later:
                text = f"{node.expression} reads {name} in place of {mine or 'an operand'}"
                edit = GoldenEdit((Action(node.index, i, do(take), (("other", key),)),), node.line)
                params = {"operand": mine, "exchanged": [mine, name], "factor": name, "named": name}
                yield NamedEdit("wrong_saved_tensor", text, edit, 0.33, params, ("swapped_results", "stale_state"))


def _readers(graph: Graph) -> dict[Key, list[tuple[Node, int]]]:
    readers: dict[Key, list[tuple[Node, int]]] = {}
    for node, i, key, _ in graph.operands():
        if node.index in graph.behind and not node.backward and node.line and node.owns and node.name not in _ALIASES:
            readers.setdefault(key, []).append((node, i))
    return readers


def _stale(graph: Graph) -> Iterator[NamedEdit]:
    """In every turn of a loop one operator reads an operand from before its update, or the update too early."""
    kinds: dict[tuple, list[_Pair]] = {}
    readers = _readers(graph)
    for maker, j, key, a in graph.operands():
        if maker.backward or not maker.line or maker.name not in _STEPS or not maker.owns or not floating(maker.out):
            continue
        if a.shape != maker.out.shape:
            continue
        for updated, source in ((False, maker.index), (True, key)):
            for read, i in readers.get(source, []):
                if not updated or read.index > maker.index:
                    kind = (maker.name, maker.line, j, read.name, read.line, i, read.index - maker.index)
                    kinds.setdefault((updated, *kind), []).append((maker, j, read, i))
    count = 0
    for (updated, *_), pairs in kinds.items():
        if _TURNS[0] <= len(pairs) <= _TURNS[1] and len({read.index for _, _, read, _ in pairs}) == len(pairs):
            count += 1
            if count > _STALE:
                return
            yield _in_every_turn(graph, updated, pairs)


def _in_every_turn(graph: Graph, updated: bool, pairs: list[_Pair]) -> NamedEdit:
    actions = tuple(
        Action(read.index, i, do(see), (("other", maker.index),) if updated else
               (("other", (maker.index, j)), ("like", maker.index)))
        for maker, j, read, i in pairs
    )  # fmt: skip
    maker, j, read, _ = pairs[-1]
    name, other = maker.operand(j) or "an operand", maker.operand(1 - j) if len(maker.operands) > 1 else ""
    text = f"in each of {len(pairs)} steps {read.expression} reads "
    text += f"{maker.expression} in place of {name}" if updated else f"{name} from before {maker.expression}"
    product = maker.name not in ("add", "sub")
    cause: str
    also: tuple[str, ...]
    cause, also = "wrong_saved_tensor", ("wrong_factor" if product else "missing_term", "stale_state")
    if not updated and not product:  # a running sum loses an addend; if the sum runs over a loop, the last one
        at = sum(isinstance(a, Tensor) for a in maker.args[:j])
        before = graph.maker(maker.makers[at])
        cause, also = "missing_term", ("wrong_saved_tensor", "stale_state")
        if before is not None and (before.name, before.line) == (maker.name, maker.line):
            cause, also = "off_by_one", ("truncated_reduction", "missing_term", *also)
    params: dict[str, Any] = {"operand": name, "factor" if product else "term": other}
    return NamedEdit(cause, text, GoldenEdit(actions, read.line), 0.5, params, also)


def _updated(graph: Graph) -> Iterator[NamedEdit]:
    """An operator reads a tensor after its update in place, where the golden reads the value before."""
    readers: dict[Key, list[Node]] = {}
    for node in graph.nodes:
        for key in node.makers if not node.backward else ():
            readers.setdefault(key, []).append(node)
    count = 0
    for node in graph.nodes:
        if node.backward or node.index not in graph.behind or node.name not in _READING:
            continue
        places = [i for i, a in enumerate(node.args) if isinstance(a, Tensor)]
        for i, key in zip(places, node.makers, strict=False):
            near = [n for n in readers.get(key, []) if n.index < node.index]
            far = [m for n in near for m in readers.get(n.index, []) if m.index < node.index]
            updates = {n.index: n for n in (*far, *near)}
            own = node.args[i]
            some = [n for n in updates.values() if floating(own) and floating(n.out) and n.out.shape == own.shape
                    and n.owns and n.index not in node.makers]  # fmt: skip
            for other in some[:_OTHERS]:
                count += 1
                if count > _UPDATED:
                    return
                mine = node.operand(i) or "an operand"
                text = f"{node.expression} reads {other.expression} in place of {mine}: "
                text += f"{mine} is updated before it is read"
                edit = GoldenEdit((Action(node.index, i, do(take), (("other", other.index),)),), node.line)
                params = {"operand": mine, "exchanged": [mine, other.expression]}
                yield NamedEdit("wrong_saved_tensor", text, edit, 0.32, params, ("aliased", "stale_state"))


def _unscaled(graph: Graph) -> Iterator[NamedEdit]:
    """A factor multiplies one addend of a sum only: a gate before the bias, a scale before a shift."""
    kinds: dict[tuple, list[tuple[Node, Node, int]]] = {}
    for node in graph.nodes:
        if node.backward or node.index not in graph.behind or node.name not in ("mul", "div") or len(node.makers) != 2:
            continue
        for i, key in enumerate(node.makers):
            added = graph.maker(key)
            if added is None or added.name not in ("add", "sub") or not added.owns or node.name == "div" and i:
                continue
            if len(added.makers) == 2 and all(floating(a) or whole(a) for a in (*added.args[:2], node.args[i])):
                kind = (added.name, added.line, node.name, node.line, i, node.index - added.index)
                kinds.setdefault(kind, []).append((added, node, i))
    for pairs in kinds.values():
        added, node, operand = pairs[-1]
        for outside in (1, 0) if len(pairs) <= _TURNS[1] else ():
            actions = []
            for a, product, i in pairs:
                sign = (-1.0 if a.name == "sub" else 1.0) * float(a.kwargs.get("alpha", 1))
                part = do(scale_part, operand=i, scaled=1 - outside, sign=sign)
                actions.append(Action(product.index, CALL, part, (("p", (a.index, 0)), ("q", (a.index, 1)),
                                                                  ("whole", a.index))))  # fmt: skip
            term, factor = added.operand(outside) or "an addend", node.operand(1 - operand) or "a factor"
            times = f", in {len(pairs)} places" if len(pairs) > 1 else ""
            text = f"{term} is added after {node.expression}: {factor} does not multiply it{times}"
            yield NamedEdit("wrong_factor", text, GoldenEdit(tuple(actions), node.line), 0.6,
                            {"factor": factor, "term": term}, ("missing_term",))  # fmt: skip
