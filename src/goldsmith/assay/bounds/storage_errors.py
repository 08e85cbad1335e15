"""What the error analysis keeps beside each storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class Twin:
    storage: StorageWeakRef  # a weak reference also keeps the address from being used again
    error: Tensor | None
    notes: frozenset[str]
    stores: set[tuple] = field(default_factory=set)  # the views whose error holds the rounding of a store already
    terms: int = 0  # of the sum that made it
    size: Tensor | None = None  # of a product, and of what it was scaled to: sum_i |a_i b_i|, flat


def slots(t: Tensor) -> int:
    """How many elements a twin has: as many as the storage; of complex numbers two, as their real view sees them."""
    return t.untyped_storage().nbytes() // (t.element_size() // 2 if t.is_complex() else t.element_size())


def view_key(t: Tensor, dtype: torch.dtype) -> tuple:
    return (t.storage_offset(), t.shape, t.stride(), dtype)


def tensors(args: Iterable[object], kwargs: Mapping[str, object]) -> Iterator[Tensor]:
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from (b for b in a if isinstance(b, Tensor))
