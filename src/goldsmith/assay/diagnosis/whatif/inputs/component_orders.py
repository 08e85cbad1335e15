"""The few components of a vector in another order: a quaternion as (x, y, z, w), a colour as (blue, green, red).

A cyclic shift counts as such an order too: values do not wrap around an end by accident.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from torch import Tensor

from ...graph.tensors import floating
from ..change import Change

_FEWEST, _MOST = 3, 4  # components
Leaves = Mapping[str, Tensor]


def changes(leaves: Leaves) -> Iterator[Change]:
    for name, t in leaves.items():
        if not floating(t) or name.startswith("grad_") or t.dim() < 2 or not _FEWEST <= t.shape[-1] <= _MOST:
            continue
        n = t.shape[-1]
        rows = t.numel() // n
        if rows < 2 or n in t.shape[:-1]:  # an axis of places may be as short; components are another kind of axis
            continue
        for order in _orders(n):

            def read(now: Leaves, name: str = name, order: tuple[int, ...] = order) -> Leaves:
                return {name: now[name][..., list(order)].contiguous()}

            text = f"the components of {name} are read in the order {', '.join(map(str, order))}"
            params = {"operand": name, "axis": t.dim() - 1, "index": list(order)}
            yield Change("permuted", text, -1, None, params, 0.66, leaves=read, also=("shifted", "wrong_format"))


def _orders(n: int) -> Iterator[tuple[int, ...]]:
    own = tuple(range(n))
    for step in range(1, n):
        yield own[step:] + own[:step]
    for i, j in combinations(own, 2):
        other = list(own)
        other[i], other[j] = j, i
        yield tuple(other)
    if n > _FEWEST:
        yield own[::-1]
