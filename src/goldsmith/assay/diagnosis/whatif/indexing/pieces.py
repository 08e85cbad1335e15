"""Pieces of one tensor taken for each other, such as gates that a single product computes side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from ...graph.node import Changed, Node
from ...graph.tensors import floating
from ..change import Change, instead

_LISTS = ("split", "split_with_sizes", "unbind", "chunk", "unsafe_split")
_VIEWS = ("slice", "select", "narrow")
_MOST = 16  # pieces of one tensor


@dataclass
class _Cut:
    """A tensor cut along one axis, by operators that return all pieces or one piece each."""

    source: str
    lists: list[Node] = field(default_factory=list)
    # layout of a piece -> the operators that take it
    views: dict[tuple, list[Node]] = field(default_factory=dict)

    @property
    def shapes(self) -> list[torch.Size]:
        if self.lists:
            return [t.shape for t in self.lists[0].out]
        return [same[0].out.shape for same in self.views.values()]

    def read(self, takes: dict[int, int]) -> Iterator[tuple[int, Changed]]:
        """The operators' results if piece takes[i] is read in place of piece i."""
        for call in self.lists:
            yield call.index, _listed(takes)
        pieces = list(self.views.values())
        for i, j in takes.items():
            for call in pieces[i] if pieces else ():
                yield call.index, _like(pieces[j][0])


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    for cut in _cuts(calls, among):
        shapes = cut.shapes[:_MOST]
        for i, j in combinations(range(len(shapes)), 2):
            if shapes[i] != shapes[j]:
                continue
            also = ("permuted", "wrong_stride")
            yield _change(cut, f"pieces {i} and {j} of {cut.source} are exchanged", {i: j, j: i}, 0.6, also)
            for one, two in ((i, j), (j, i)):
                text = f"piece {two} of {cut.source} is read in place of piece {one}"
                yield _change(cut, text, {one: two}, 0.5, also[1:])


def _change(cut: _Cut, text: str, takes: dict[int, int], prior: float, also: tuple[str, ...]) -> Change:
    group = tuple(cut.read(takes))
    params = {"operand": cut.source, "exchanged": sorted({*takes, *takes.values()})}
    return Change("swapped_results", text, group[0][0], group[0][1], params, prior, group=group, also=also)


def _cuts(calls: Sequence[Node], among: set[int]) -> Iterator[_Cut]:
    cuts: dict[tuple, _Cut] = {}
    for call in calls:
        if call.backward or not call.makers or not call.args or not floating(call.args[0]):
            continue
        source = call.operands[0] or call.makers[0]
        cut = (source, tuple(call.args[0].shape), call.name)
        if call.name in _LISTS and isinstance(call.out, list | tuple) and len(call.out) > 1:
            cuts.setdefault((*cut, *call.args[1:]), _Cut(str(source))).lists.append(call)
        elif call.name in _VIEWS and call.index in among and call.out.shape != call.args[0].shape:
            place = tuple(call.args[1:])
            cuts.setdefault((*cut, *place[:1]), _Cut(str(source))).views.setdefault(place, []).append(call)
    yield from (cut for cut in cuts.values() if cut.lists or len(cut.views) > 1)


def _listed(takes: dict[int, int]) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        return [out[takes.get(i, i)] for i in range(len(out))]

    return run


def _like(there: Node) -> Changed:
    return instead(lambda x, *args, **kwargs: there.func(x, *there.args[1:], **there.kwargs))
