"""Another order of a launch's programs in Triton's interpreter.

The interpreter runs programs one after another, by their numbers. A GPU promises no order, and runs many at once, so
that results which need the interpreter's order are wrong there now and then: a program overwrites what another one has
written, adds to what another one sets to zero, or reads what another one has yet to write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

MODULE = "triton.runtime.interpreter"
_READS = ("create_load", "create_masked_load", "create_atomic_cas", "create_atomic_rmw")
_MOST_READS = 20_000  # of one program, which take it about two seconds


class WaitsForOthers(RuntimeError):
    """A program that reads memory so often that it may wait for another one, which runs after it."""


@contextmanager
def programs_backwards() -> Iterator[None]:
    """Context in which the interpreter runs the programs of a launch from the last to the first.

    A program that waits for another one raises WaitsForOthers, which the interpreter turns into its own error.
    """
    builder: Any = getattr(sys.modules.get(MODULE), "interpreter_builder", None)
    if not all(hasattr(builder, name) for name in ("set_grid_idx", "grid_dim", *_READS)):
        yield
        return
    left = [0]
    changes = {"set_grid_idx": partial(_last_first, builder, builder.set_grid_idx, left)}
    changes |= {name: partial(_counted, getattr(builder, name), left) for name in _READS}
    before = {name: vars(builder)[name] for name in changes if name in vars(builder)}
    vars(builder).update(changes)
    try:
        yield
    finally:
        for name in changes:
            del vars(builder)[name]
        vars(builder).update(before)


def _last_first(builder: Any, place: Any, left: list[int], *numbers: int) -> None:
    left[0] = _MOST_READS
    place(*(size - 1 - number for size, number in zip(builder.grid_dim, numbers, strict=True)))


def _counted(read: Any, left: list[int], *args: object, **kwargs: object) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise WaitsForOthers(f"more than {_MOST_READS} reads in one program")
    return read(*args, **kwargs)
