"""Weights that the backward reads as they were before the division by their total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ...graph.node import Instead, Key, Node, read_back
from ...graph.tensors import floating
from ..change import Change
from .saved_tensors import followed

_MOVES = frozenset("clone _to_copy contiguous detach alias".split())


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """exp(x - max x) in place of a softmax, which divides that by its sum."""
    read = read_back(calls, among)
    for call in calls:
        if call.backward or call.name != "_softmax" or not floating(call.out) or call.index not in read:
            continue
        text = f"the backward reads {call.expression} as it was before it was divided by its total"
        yield Change("wrong_saved_tensor", text, -1, None, {"saved": call.expression}, 0.48,
                     saved=_undivided(list(calls), call), also=("missing_rescale", "wrong_factor"))  # fmt: skip


def _undivided(calls: list[Node], call: Node) -> Instead:
    dim = int(call.args[1])

    def instead(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        p = tensors.get(call.index)
        return {} if p is None else followed(calls, {call.index: p / p.amax(dim, keepdim=True)}, _MOVES)

    return instead
