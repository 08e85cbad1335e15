"""The keys and values of a step's sequences: one buffer for each layer, which grows by doubling."""

from __future__ import annotations

from collections.abc import MutableSequence

import torch
from torch import Tensor

LEAST = 256  # positions of the first buffer


class StepCache:
    """keys and values [rows, kv_heads, capacity, D] of every layer, of which the first `length` positions are used

    starts   [rows]: the first position of each sequence; earlier ones are padding
    shared   False if somebody else has replaced a layer's tensors, so that these buffers are not the cache any more
    """

    def __init__(self, keys: MutableSequence[Tensor], values: MutableSequence[Tensor], starts: Tensor) -> None:
        """Takes the tensors out of the two lists one by one, so that no more than one is in memory twice."""
        self.length = keys[0].shape[2]
        self.starts = starts.to(torch.int64).contiguous()
        self.padded = int(self.starts.sum())  # positions before the sequences' beginnings
        self.keys, self.values = keys, values
        self.capacity, self.shared = 0, True
        self.reserve(self.length + 1)

    @property
    def rows(self) -> int:
        return len(self.starts)

    def reserve(self, positions: int) -> bool:
        """Grows the buffers to at least this many positions; returns whether they changed."""
        if positions <= self.capacity:
            return False
        self.capacity = max(LEAST, positions + positions // 2)
        for tensors in (self.keys, self.values):
            for i, tensor in enumerate(tensors):
                tensors[i] = self._grown(tensor)
        return True

    def _grown(self, tensor: Tensor) -> Tensor:
        rows, heads, _, width = tensor.shape
        with torch.inference_mode(False):  # the buffers are also written outside inference mode
            fresh = torch.empty(rows, heads, self.capacity, width, dtype=tensor.dtype, device=tensor.device)
        fresh[:, :, : self.length] = tensor[:, :, : self.length]
        return fresh
