"""Twin: the error and the notes that the analysis keeps for each storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class Twin:
    storage: StorageWeakRef  # a weak reference also keeps the address from being reused
    error: Tensor | None
    notes: frozenset[str]
    stores: set[tuple] = field(default_factory=set)  # views whose error already includes the rounding of a store
    terms: int = 0  # number of terms if a sum made it
    size: Tensor | None = None  # for a product, scaled or not: sum_i |a_i b_i|, flat


def slots(t: Tensor) -> int:
    """Number of elements of a twin: one per element of the storage, two per complex number, as in its real view."""
    return t.untyped_storage().nbytes() // (t.element_size() // 2 if t.is_complex() else t.element_size())


def view_key(t: Tensor, dtype: torch.dtype) -> tuple:
    return (t.storage_offset(), t.shape, t.stride(), dtype)


def tensors(args: Iterable[object], kwargs: Mapping[str, object]) -> Iterator[Tensor]:
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from (b for b in a if isinstance(b, Tensor))
