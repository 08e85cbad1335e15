"""Planted faults, for tests of programs that rely on the guard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..core.shapes import check_at_least, check_choice
from .engine import Engine
from .guard.faults import PLACES, Fault

OP = "offload.testing.inject"


@contextmanager
def inject(
    engine: Engine,
    stage: str,
    *,
    layer: int,
    expert: int | None = None,
    rows: Sequence[int] | None = None,
    value: float = math.nan,
    times: int = 1,
) -> Iterator[None]:
    """A context manager in which the next `times` calls of `layer` have a fault

    stage    "weights" (the expert's numbers), "input" (x), "routing" (the weights of the merge), "gate_up",
             "activation", "product", "down" (the result of that stage, also in every recomputation), "transfer" (a
             slot's bytes, or rows on their way to the device), "merge" (a row that no lane writes), "race" (rows that
             are different in a recomputation)
    expert   None: every used expert. rows: tokens of a call; None: all
    value    the planted value: NaN, or Inf
    Raises ValueError for an unknown stage, layer or expert, and for an invalid number of times.
    """
    check_choice(OP, "stage", stage, PLACES)
    check_at_least(OP, "times", times, 1)
    experts = engine.store.num_experts(layer)
    if expert is not None and not 0 <= expert < experts:
        raise ValueError(f"{OP}: expert={expert}, but layer {layer} has 0..{experts - 1}")
    fault = Fault(stage, layer, expert, None if rows is None else tuple(rows), value, times)
    engine._faults.add(fault)
    try:
        yield
    finally:
        engine._faults.remove(fault)
