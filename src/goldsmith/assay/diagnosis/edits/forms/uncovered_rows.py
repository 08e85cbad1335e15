"""Rows that no part covers, so that zeros arrive for them: the rest after equal parts, indices that are too large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.tensors import floating, whole
from ..golden_edit import RESULT, Action, NamedEdit, Source, do, named
from ..primitives.positions import hide_rows

_LOOKUPS = frozenset("index index_select embedding gather".split())
_PARTS = (2, 3, 4, 8)
_NARROW = ((8, torch.int8), (16, torch.int16), (32, torch.int32))


def edits(graph: Graph, numbers: Mapping[str, object]) -> Iterator[NamedEdit]:
    """One of the numbers may be the number of parts."""
    case_counts = {n: k for k, n in numbers.items() if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= 64}
    parts = {**{n: "" for n in _PARTS}, **case_counts}
    for node in graph.nodes:
        if node.index not in graph.behind or not node.args or not floating(node.args[0]) or not floating(node.out):
            continue
        if node.name in _LOOKUPS:
            yield from _of_a_lookup(node, parts)


def _rests(n: int, parts: Mapping[int, str]) -> Iterator[tuple[int, int, str]]:
    """(number of parts, first place after them, text)"""
    for count, name in parts.items():
        if count < n and n % count:
            of = f"{name}, {count}" if name else f"{count}"
            text = f"the remainder of {n} after {of} equal parts of {n // count} is in none of them"
            yield count, n - n % count, text


def _looked_up(node: Node) -> tuple[Tensor, Source, int, int] | None:
    """(the index, where the operator reads it, number of rows, axes of the result after those of the index)"""
    x = node.args[0]
    if node.name == "index":
        some = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]
        if len(some) != 1 or some[0][0] or not whole(some[0][1]):
            return None
        return some[0][1], (node.index, 1), x.shape[0], x.dim() - 1
    at = 1 if node.name == "embedding" else 2
    axis = 0 if node.name == "embedding" else node.args[1] % max(x.dim(), 1)
    if not whole(node.args[at]) or node.name == "index_select" and axis:
        return None
    return node.args[at], (node.index, at), x.shape[axis], 0 if node.name == "gather" else x.dim() - 1


def _of_a_lookup(node: Node, parts: Mapping[int, str]) -> Iterator[NamedEdit]:
    lookup = _looked_up(node)
    if lookup is None or not lookup[0].numel():
        return
    index, source, n, behind = lookup
    most = int(index.max())

    def hidden(cause: str, prior: float, text: str, also: tuple[str, ...], params: dict, **rule: Any) -> NamedEdit:
        hide = Action(node.index, RESULT, do(hide_rows, behind=behind, **rule), (("index", source),))
        return named(node, cause, prior, f"{node.expression} {text}", also=also, **params).acting(hide)

    for _, limit, why in _rests(n, parts):
        if most >= limit:
            yield hidden("missing_partition", 0.5, f"reads nothing from index {limit} on: {why}",
                         ("off_by_one", "wrong_mask"), {"from": limit}, limit=limit)  # fmt: skip
    for bits, dtype in _NARROW:
        if most > torch.iinfo(dtype).max:
            text = f"has indices of {bits} bits with a sign: those that become negative read nothing"
            yield hidden("index_overflow", 0.55, text, ("dtype_width", "invalid_index"), {"bits": bits}, dtype=dtype)
