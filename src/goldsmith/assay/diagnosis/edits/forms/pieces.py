"""Pieces of one tensor taken for each other, and rows stored or read as if the axes of a buffer lay in another order.

A single product often computes several gates side by side. A cache of [pages, heads, page, D] that is written as
[pages, page, heads, D] holds every row, but at another row's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import CALL, Action, GoldenEdit, NamedEdit, do, named
from ..primitives.positions import memory_order, other_piece, other_pieces, with_layout

_LISTS = ("split", "split_with_sizes", "unbind", "chunk", "unsafe_split")
_VIEWS = ("slice", "select", "narrow")
_MOST = 16  # pieces of one tensor
_READS = frozenset("index gather index_select embedding take_along_dim".split())
_STORES = frozenset("index_put index_put_ index_copy index_copy_ scatter scatter_ index_add index_add_".split())
_NUMBERS = 1 << 20


@dataclass
class _Cut:
    """A tensor cut along one axis, by operators that return all pieces or one piece each."""

    source: str
    lists: list[Node] = field(default_factory=list)
    views: dict[tuple, list[Node]] = field(default_factory=dict)  # place of a piece -> the operators that take it

    @property
    def shapes(self) -> list[torch.Size]:
        if self.lists:
            return [t.shape for t in self.lists[0].out]
        return [same[0].out.shape for same in self.views.values()]

    def edit(self, text: str, takes: dict[int, int], prior: float, also: tuple[str, ...]) -> NamedEdit:
        """Piece takes[i] is read in place of piece i."""
        actions = [Action(node.index, CALL, do(other_pieces, takes=tuple(takes.items()))) for node in self.lists]
        places = list(self.views)
        for i, j in takes.items() if places else ():
            piece = do(other_piece, place=places[j])
            actions += [Action(node.index, CALL, piece) for node in self.views[places[i]]]
        params = {"operand": self.source, "exchanged": sorted({*takes, *takes.values()})}
        return NamedEdit("swapped_results", text, GoldenEdit(tuple(actions)), prior, params, also)


def edits(graph: Graph) -> Iterator[NamedEdit]:
    for cut in _cuts(graph):
        shapes = cut.shapes[:_MOST]
        for i, j in combinations(range(len(shapes)), 2):
            if shapes[i] == shapes[j]:
                also = ("permuted", "wrong_stride")
                yield cut.edit(f"pieces {i} and {j} of {cut.source} are exchanged", {i: j, j: i}, 0.6, also)
                for one, two in ((i, j), (j, i)):
                    text = f"piece {two} of {cut.source} is read in place of piece {one}"
                    yield cut.edit(text, {one: two}, 0.5, also[1:])


def _cuts(graph: Graph) -> Iterator[_Cut]:
    cuts: dict[tuple, _Cut] = {}
    for node in graph.nodes:
        if node.backward or not node.makers or not node.args or not floating(node.args[0]):
            continue
        source = node.operands[0] or node.makers[0]
        cut = (source, tuple(node.args[0].shape), node.name)
        if node.name in _LISTS and isinstance(node.out, list | tuple) and len(node.out) > 1:
            cuts.setdefault((*cut, *node.args[1:]), _Cut(str(source))).lists.append(node)
        elif node.name in _VIEWS and node.index in graph.behind and node.out.shape != node.args[0].shape:
            place = tuple(node.args[1:])
            cuts.setdefault((*cut, *place[:1]), _Cut(str(source))).views.setdefault(place, []).append(node)
    yield from (cut for cut in cuts.values() if cut.lists or len(cut.views) > 1)


def layouts(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """Two axes of a buffer's memory, taken in the other order by a lookup or a store."""
    if node.name not in _READS | _STORES or node.backward or not node.args or not floating(node.args[0]):
        return
    x = node.args[0]
    shape = [x.shape[d] for d in memory_order(x)]
    for i, j in combinations(range(x.dim()), 2) if x.dim() > 1 and x.numel() <= _NUMBERS else ():
        if shape[i] != shape[j] and min(shape[i], shape[j]) > 1:
            name = node.operand(0) or node.expression
            text = f"axes {i} and {j} of the memory of {name} are taken in the other order by {node.name}"
            other = CALL, do(with_layout, i=i, j=j, stores=node.name in _STORES)
            yield named(node, "wrong_stride", 0.55, text, other, also=("transposed", "invalid_index"), operand=name,
                        axes=[i, j])  # fmt: skip
