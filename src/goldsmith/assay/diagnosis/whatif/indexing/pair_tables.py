"""Square tables with a number for each pair, read by columns instead of rows.

Examples are transitions between states, biases between places, and distances between nodes, which are added to pairs or
multiply them, in one step or in every iteration of a loop. If the table is also read correctly elsewhere, no change of
the input explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced, whole
from ..change import Change, with_arguments

_PAIRED = frozenset("add add_ sub sub_ rsub mul mul_ div where maximum minimum addcmul".split())


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if not call.backward and call.name in _PAIRED and floating(call.out):
        for i, a in enumerate(call.args):
            if _square(a):
                yield _transposed(call, i)
    if not call.backward and call.name == "index" and isinstance(call.args[0], Tensor):
        yield from _looked_up(call)


def _square(a: object) -> bool:
    """Whether it is a square table that is not symmetric."""
    if not isinstance(a, Tensor) or not floating(a) or a.dim() < 2 or not a.shape[-1] == a.shape[-2] > 1:
        return False
    return not torch.equal(a, a.mT)


def _transposed(call: Node, at: int) -> Change:
    name = call.operand(at) or "a table"
    text = f"{call.expression} reads {name} by its columns, not by its rows"
    change = with_arguments(lambda args: replaced(args, at, args[at].mT))
    return Change("transposed", text, call.index, change, {"operand": name}, 0.6, also=("invalid_index",))


def _looked_up(call: Node) -> Iterator[Change]:
    """x[i, j] read at [j, i], of a square table."""
    indices = call.args[1]
    pair = [d for d, i in enumerate(indices) if i is not None]
    table = call.args[0]
    if len(pair) != 2 or pair[1] - pair[0] != 1 or not all(whole(indices[d]) for d in pair):
        return
    if not floating(table) or table.shape[pair[0]] != table.shape[pair[1]]:
        return

    def exchanged(args: tuple) -> tuple:
        new = list(args[1])
        new[pair[0]], new[pair[1]] = args[1][pair[1]], args[1][pair[0]]
        return replaced(args, 1, new)

    text = f"{call.expression} looks up pairs of {call.operand(0) or 'a table'} in the other order"
    params = {"axes": pair}
    yield Change(
        "transposed", text, call.index, with_arguments(exchanged), params, 0.55, also=("invalid_index", "wrong_stride")
    )
