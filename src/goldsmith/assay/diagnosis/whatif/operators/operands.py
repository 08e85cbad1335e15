"""A forward operator that reads another tensor of the same shape: an input, a stage, the state before its update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, masks, replaced
from ..change import Change, with_arguments

_NEVER = frozenset("detach alias clone copy_ view expand t transpose permute unsqueeze squeeze".split())
_MOST = 400


def changes(calls: Sequence[Node], among: set[int], known: Mapping[str, Tensor]) -> Iterator[Change]:
    """`among`: the operators that the wrong tensor depends on; `known`: inputs and stages by name."""
    offers = (c for call in calls if _has_operands(call, among) for c in _read_otherwise(call, known))
    for _, change in zip(range(_MOST), offers, strict=False):
        yield change


def _has_operands(call: Node, among: set[int]) -> bool:
    return not call.backward and call.index in among and call.name not in _NEVER


def _read_otherwise(call: Node, known: Mapping[str, Tensor]) -> Iterator[Change]:
    for i, a in enumerate(call.args):
        if not floating(a) or a.numel() < 2:
            continue
        mine = call.operand(i)
        if masks(a):
            text = f"{mine or 'a mask'} is not applied where {call.expression} reads it"
            every = with_arguments(lambda args, i=i: replaced(args, i, args[i].new_ones(args[i].shape)))
            yield Change("wrong_mask", text, call.index, every, {"operand": mine}, 0.5, also=("wrong_factor",))
        for name, other in known.items():
            if name != mine and other.shape == a.shape and other.dtype == a.dtype and other is not a:
                text = f"{call.expression} reads {name} in place of {mine or 'an operand'}"
                change = with_arguments(lambda args, i=i, other=other: replaced(args, i, other))
                params = {"operand": mine, "exchanged": [mine, name], "factor": name, "named": name}
                yield Change("wrong_saved_tensor", text, call.index, change, params, 0.33,
                             also=("swapped_results", "stale_state"))  # fmt: skip
