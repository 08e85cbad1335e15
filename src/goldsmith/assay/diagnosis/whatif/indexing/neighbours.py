"""A `select` that reads the element before or after the right one.

A loop that fills a table reads earlier cells of it. Every step may then read the neighbour of the right cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, instead


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    """The text does not name the index, so that all steps of a loop can change together."""
    if call.backward or call.name != "select" or not floating(call.args[0]):
        return
    x, axis, right_index = call.args[0], call.args[1], call.args[2]
    n = x.shape[axis]
    if n < 2:
        return
    for step, side in ((1, "after"), (-1, "before")):
        neighbour_index = min(max(right_index % n + step, 0), n - 1)

        def neighbour(x: Tensor, dim: int, index: int, neighbour_index: int = neighbour_index) -> Tensor:
            return x.select(dim, neighbour_index)

        text = f"{call.expression} reads the position {side} its own along axis {axis}"
        yield Change("shifted", text, call.index, instead(neighbour), {"axis": axis, "step": step}, 0.42,
                     also=("off_by_one", "invalid_index"))  # fmt: skip
