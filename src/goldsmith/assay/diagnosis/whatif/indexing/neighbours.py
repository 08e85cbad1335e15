"""One place of a tensor read next to the right one: the cell where a step arrives, not the cell it leaves.

Recursions over a table read earlier cells. Which cell a step reads is easily off by one, in every step alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..run.calls import Change, OperatorCall, floating, instead


def changes(call: OperatorCall, calls: Sequence[OperatorCall] = ()) -> Iterator[Change]:
    """The texts are the same for every place, so that all steps of a loop can change together."""
    if call.backward or call.name != "select" or not floating(call.args[0]):
        return
    x, axis, at = call.args[0], call.args[1], call.args[2]
    n = x.shape[axis]
    if n < 2:
        return
    for step, where in ((1, "after"), (-1, "before")):
        other = min(max(at % n + step, 0), n - 1)

        def neighbour(x: Tensor, dim: int, index: int, other: int = other) -> Tensor:
            return x.select(dim, other)

        text = f"{call.expression} reads the place {where} its own along axis {axis}"
        yield Change("shifted", text, call.index, instead(neighbour), {"axis": axis, "step": step}, 0.42,
                     also=("off_by_one", "invalid_index"))  # fmt: skip
