"""What was found out about a call, kept for the next call of the same signature.

A signature is what a call has apart from its numbers and addresses: shapes, dtypes, devices, options. Checking the
arguments, choosing a backend and finding a compiled kernel take longer than a small kernel runs, and all three depend
on the signature alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

MOST = 4096  # signatures that are kept; a process that has more starts again
_SIMPLE = frozenset((bool, int, float, str, type(None)))

Value = TypeVar("Value")


def signature(
    op: Hashable, backend: str, tensors: Sequence[Tensor | None], options: Mapping[str, object]
) -> Hashable | None:
    """The signature of an operator's call with plain tensors; None if an argument is of an unusual type.

    1, 1.0 and True are equal, but a check tells them apart, so the types of the options are a part.
    """
    types = (type(backend), *map(type, options.values()))
    if not _SIMPLE.issuperset(types):
        return None
    try:
        parts = [None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in tensors]
    except RuntimeError:  # a nested tensor has no shape
        return None
    return op, backend, types, tuple(options.items()), tuple(parts)


def keep(table: dict[Hashable, Value], key: Hashable | None, value: Value) -> Value:
    """Remembers the value for a signature, unless that is None; returns the value."""
    if key is not None:
        if len(table) >= MOST:
            table.clear()
        table[key] = value
    return value
