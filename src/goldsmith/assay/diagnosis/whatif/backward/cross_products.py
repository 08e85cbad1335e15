"""Cross products in a backward, where a kernel writes out the two products of each component.

In the forward, `decompositions` writes out the golden's own cross product, so the changes of sums cover it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ...graph.node import Node
from ..change import Change, instead

_KINDS = (
    ("sign_flip", "its minus is a plus", 1.0, 1.0),
    ("missing_term", "its second product is left out", 1.0, 0.0),
    ("missing_term", "its first product is left out", 0.0, -1.0),
)


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name != "linalg_cross" or not call.backward:
        return
    for cause, how, first, second in _KINDS:

        def product(a: Tensor, b: Tensor, *, dim: int = -1, x: float = first, y: float = second, **_: object) -> Tensor:
            return x * a.roll(-1, dim) * b.roll(-2, dim) + y * a.roll(-2, dim) * b.roll(-1, dim)

        yield Change(cause, f"{how} in {call.expression}", call.index, instead(product), {}, 0.6)
