"""A wrong weight for the first or last place of an input: a recursion that starts from zero, not from its input.

An average h <- a h + (1 - a) x has the first x itself as its first h. If it starts from zero, that x has the weight
1 - a. The weight is computed from scalars of the case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...graph.tensors import floating
from ..change import Change

_SHORT, _MOST = 2, 96  # places along an axis, at least; changes altogether
Leaves = Mapping[str, Tensor]


def changes(leaves: Leaves, numbers: Mapping[str, Any]) -> Iterator[Change]:
    weights = list(_weights(numbers))
    inputs = {n: t for n, t in leaves.items() if floating(t) and not n.startswith("grad_")}
    places = [
        (name, axis, at, which)
        for name, t in inputs.items()
        for axis in range(t.dim())
        for at, which in ((0, "first"), (t.shape[axis] - 1, "last"))
        if t.shape[axis] > _SHORT
    ]
    if len(places) * len(weights) > _MOST:
        weights = weights[: max(1, _MOST // len(places))]
    for formula, weight in weights:
        for name, axis, at, which in places:

            def weighed(now: Leaves, name: str = name, axis: int = axis, at: int = at, w: float = weight) -> Leaves:
                new = now[name].clone()
                new.select(axis, at).mul_(w)
                return {name: new}

            text = f"the {which} position of {name} along axis {axis} is multiplied by {formula} = {weight:.6g}"
            params = {"factor": formula, "named": formula, "input": name, "axis": axis}
            prior = 0.5 if which == "first" else 0.45
            yield Change("wrong_factor", text, -1, None, params, prior, leaves=weighed, also=("missing_term",))


def _weights(numbers: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    real = {n: v for n, v in numbers.items() if isinstance(v, float) and math.isfinite(v) and 0 < abs(v) and v != 1}
    for n, v in real.items():
        yield f"1 - {n}", 1 - v
        yield n, v
    for n, v in real.items():
        yield f"1 / (1 - {n})", 1 / (1 - v)
        yield f"1 / {n}", 1 / v
        if 0 < v < 1:
            yield f"sqrt(1 - {n})", math.sqrt(1 - v)
            yield f"sqrt({n})", math.sqrt(v)
