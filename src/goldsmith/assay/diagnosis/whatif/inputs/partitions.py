"""Stacked inputs, such as experts' weights, read with the stride of a partition of two.

entry e of n is read where entry e // 2 lies         its number is taken for that of a half
entry e starts at e times half an entry's size       the stride is that of half an entry
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ...edits.positions import half_stride
from ...graph.node import Instead, Key, Node, read_back
from ...graph.tensors import floating
from ..backward.saved_tensors import followed
from ..change import Change

_LEAST = 3  # entries: with two, the second would be read where the first lies in both cases
_PAIRS = 28
_NUMBERS = 1 << 20
_FOLLOWED = frozenset("index_select index gather clone _to_copy contiguous".split())
_ALSO = ("invalid_index",)
Leaves = Mapping[str, Tensor]
Read = Callable[[Tensor], Tensor]


def _halved(t: Tensor) -> Tensor:
    return t.index_select(0, torch.arange(len(t), device=t.device) // 2)


_READS: tuple[tuple[str, Read], ...] = (
    ("entry i of {} is read at i // 2", _halved),
    ("the stride between the entries of {} is half of the right one", half_stride),
)


def in_backward(calls: Sequence[Node], among: set[int], leaves: Leaves) -> Iterator[Change]:
    """Changes of inputs that only the backward reads wrongly: one, two of equally many entries, or all of those."""
    read = read_back(calls, among)
    alike: dict[int, list[str]] = {}
    for name, t in _stacked(leaves):
        if name in read:
            alike.setdefault(len(t), []).append(name)
    for names in alike.values():
        some: list[tuple[str, ...]] = [(name,) for name in names]
        some += list(combinations(names, 2))[:_PAIRS]
        some += [tuple(names)] if len(names) > 2 else []
        for phrase, read_so in _READS:
            for group in some:
                text = f"in the backward {phrase.format(' and '.join(group))}"
                params = {"operand": group[0], "saved": group[0], "axis": 0}
                yield Change("wrong_stride", text, -1, None, params, 0.58,
                             saved=_instead(list(calls), group, read_so), also=_ALSO)  # fmt: skip


def _stacked(leaves: Leaves) -> Iterator[tuple[str, Tensor]]:
    for name, t in leaves.items():
        is_input = floating(t) and not name.startswith("grad_")
        if is_input and t.dim() > 1 and len(t) >= _LEAST and 1 < t[0].numel() and t.numel() <= _NUMBERS:
            yield name, t


def _instead(calls: list[Node], names: tuple[str, ...], read: Read) -> Instead:
    def instead(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        if not all(name in tensors for name in names):
            return {}
        return followed(calls, {name: read(tensors[name]) for name in names}, _FOLLOWED)

    return instead
