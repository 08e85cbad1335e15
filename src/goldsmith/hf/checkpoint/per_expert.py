"""A tensor [E, ...] that is read one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


class PerExpertTensor:
    """A tensor [E, ...] that is read one expert at a time: `[e]`, `len`, `iter`, `shape`, `dtype`."""

    def __init__(self, read: Callable[[int], Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        self._read, self.shape, self.dtype = read, tuple(shape), dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        if not 0 <= expert < self.shape[0]:
            raise IndexError(expert)  # ends an iteration over a sequence
        return self._read(expert)

    def __iter__(self) -> Iterator[Tensor]:
        return (self._read(expert) for expert in range(self.shape[0]))


Part = Tensor | PerExpertTensor
