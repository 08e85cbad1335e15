"""A factor or an addend that is missing in one piece of a concatenated tensor, because a kernel has a branch for each.

In the place that one piece covers, also in the tensors made from it, one operator is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import CALL, NamedEdit, do, named
from ..primitives.formulas import drop_operand_within

_PRODUCTS, _SUMS = ("mul", "div"), ("add", "sub")
_MOST = 8  # pieces
_Piece = tuple[str, int, int]  # name, first place, place after the last


def edits(graph: Graph) -> Iterator[NamedEdit]:
    forward = [n for n in graph.nodes if not n.backward and n.index in graph.behind and floating(n.out)]
    pieces: dict[int, dict[_Piece, None]] = {}  # by the length of the whole
    for node in forward:
        if node.name == "cat" and 1 < len(node.args[0]) <= _MOST:
            ends = list(accumulate(t.shape[node.args[1] if len(node.args) > 1 else 0] for t in node.args[0]))
            for number, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False)):
                name = f"in piece {number + 1} of {len(ends)}, {lo}..{hi - 1},"
                if 0 < hi - lo < ends[-1]:
                    pieces.setdefault(ends[-1], {})[name, lo, hi] = None
    for node in forward if pieces else ():
        if node.name in (*_PRODUCTS, *_SUMS) and node.owns and len(node.args) > 1:
            for axis, n in enumerate(node.out.shape):
                for piece in list(pieces.get(n, ()))[:_MOST]:
                    yield from _left_out(node, axis, piece)


def _left_out(node: Node, axis: int, piece: _Piece) -> Iterator[NamedEdit]:
    where, lo, hi = piece
    product = node.name in _PRODUCTS
    for keep in (0,) if node.name in ("div", "sub") else (0, 1):
        kept, gone = node.args[keep], node.args[1 - keep]
        if floating(kept) and (floating(gone) or not isinstance(gone, Tensor)):
            name = node.operand(1 - keep) or f"an operand of {node.name}"
            text = f"{where} of axis {axis} {name} is left out of {node.expression}"
            without = CALL, do(drop_operand_within, keep=keep, axis=axis, lo=lo, hi=hi)
            params: dict[str, Any] = {"axis": axis, "part": [lo, hi], "factor" if product else "term": name}
            yield named(node, "wrong_factor" if product else "missing_term", 0.5, text, without, **params)
