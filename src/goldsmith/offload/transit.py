"""Buffers of the CPU that copies to and from a device run through: bytes, given back through events alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .streams import DONE


class Transit:
    """`count` buffers in turn; one is handed out again when the event that it came back with has happened.

    They hold bytes: what is read through them keeps its dtype, whatever was there before.
    """

    def __init__(self, allocate: Callable[[int], Tensor], count: int = 2) -> None:
        self._allocate = allocate
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * count
        self._free: list[Any] = [DONE] * count
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next buffer, as a tensor; it may hold anything."""
        self._at = (self._at + 1) % len(self._buffers)
        self._free[self._at].synchronize()
        numel = 1
        for size in shape:
            numel *= size
        nbytes = numel * dtype.itemsize
        if self._buffers[self._at].numel() < nbytes:
            with torch.inference_mode(False):
                self._buffers[self._at] = self._allocate(max(4096, nbytes))
        return self._buffers[self._at][:nbytes].view(dtype).view(shape)

    def give_back(self, event: Any) -> None:
        """The buffer that was taken last is free once this has happened."""
        self._free[self._at] = event
