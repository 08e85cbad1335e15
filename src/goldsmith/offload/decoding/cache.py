"""The keys and values of a step's sequences: one batch with padding, or sequences that come and go."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

LEAST = 256  # positions of the first buffer of a batch
TOKEN, LENGTH, ROOM, HEAD_STRIDE = range(4)  # columns of `table`, as in gs_step_row


class StepRows(Protocol):
    """What a step reads of its sequences

    table       [rows, 4] int64: token, positions in the cache, room for positions, numbers between two heads
    places      [layers, 2, rows] int64: addresses of keys and values [kv_heads, room, D]
    positions   the most positions of a sequence for which there is room
    """

    @property
    def table(self) -> Tensor: ...

    @property
    def places(self) -> Tensor: ...

    @property
    def positions(self) -> int: ...

    def make_room(self) -> None:
        """Prepares one more position of every sequence; raises ValueError if there is none."""

    def advance(self) -> None:
        """Counts the position that a step has written."""


class StepCache:
    """keys and values [rows, kv_heads, capacity, D] of every layer, of which the first `length` positions are used

    starts   [rows]: the first position of each sequence; earlier ones are padding
    shared   False if somebody else has replaced a layer's tensors, so that these buffers are not the cache any more
    """

    table: Tensor
    places: Tensor

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

    @property
    def positions(self) -> int:
        return self.capacity

    def make_room(self) -> None:
        self.reserve(self.length + 1)

    def advance(self) -> None:
        self.length += 1
        self.table[:, LENGTH] += 1

    def reserve(self, positions: int) -> None:
        """Grows the buffers to at least this many positions."""
        if positions <= self.capacity:
            return
        self.capacity = max(LEAST, positions + positions // 2)
        for tensors in (self.keys, self.values):
            for i, tensor in enumerate(tensors):
                tensors[i] = self._grown(tensor)
        self._describe()

    def _grown(self, tensor: Tensor) -> Tensor:
        rows, heads, _, width = tensor.shape
        with torch.inference_mode(False):  # the buffers are also written outside inference mode
            fresh = torch.empty(rows, heads, self.capacity, width, dtype=tensor.dtype, device=tensor.device)
        fresh[:, :, : self.length] = tensor[:, :, : self.length]
        return fresh

    def _describe(self) -> None:
        """Addresses and sizes as a step reads them; a sequence begins after its padding."""
        first = self.keys[0]
        before = self.starts * first.shape[3]
        offsets = (torch.arange(self.rows, device="cpu") * first.stride(0) + before) * first.element_size()
        self.places = torch.stack(
            [torch.stack([pair[0].data_ptr() + offsets, pair[1].data_ptr() + offsets])
             for pair in zip(self.keys, self.values, strict=True)]
        )  # fmt: skip
        self.table = torch.zeros(self.rows, 4, dtype=torch.int64, device="cpu")
        self.table[:, LENGTH] = self.length - self.starts
        self.table[:, ROOM] = self.capacity - self.starts
        self.table[:, HEAD_STRIDE] = first.stride(1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has other addresses."""
        self.__dict__.update(state)
        self._describe()


class SequenceCache:
    """Keys and values of one sequence in all layers, with room for a fixed number of positions

    keys, values   [kv_heads, length, D] of each layer, copied
    length         positions that are used
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], room: int) -> None:
        heads, self.length, width = keys[0].shape
        self.room = max(room, self.length)
        with torch.inference_mode(False):
            data = torch.empty(len(keys), 2, heads, self.room, width, dtype=keys[0].dtype, device="cpu")
        for i, pair in enumerate(zip(keys, values, strict=True)):
            for which, tensor in enumerate(pair):
                data[i, which, :, : self.length] = tensor
        self.data = data
        layer, kind = (data.stride(axis) * data.element_size() for axis in (0, 1))
        offsets = torch.arange(len(keys), device="cpu")[:, None] * layer + torch.arange(2, device="cpu") * kind
        self.places = offsets + data.data_ptr()  # [layers, 2]

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [kv_heads, length, D] of each layer, in the cache's memory."""
        return [(keys[:, : self.length], values[:, : self.length]) for keys, values in self.data]


class SequenceRows:
    """Sequences that step together; their caches stay where they are, whoever joins or leaves."""

    def __init__(self, sequences: Sequence[SequenceCache]) -> None:
        self._sequences = list(sequences)
        self.positions = max(one.room for one in sequences)
        self.places = torch.stack([one.places for one in sequences], -1)
        rows = [[0, one.length, one.room, one.data.stride(2)] for one in sequences]
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu")

    def make_room(self) -> None:
        for row, one in enumerate(self._sequences):
            if one.length >= one.room:
                raise ValueError(f"offload: sequence {row} of a step has no room for more than {one.room} positions")

    def advance(self) -> None:
        self.table[:, LENGTH] += 1
        for one in self._sequences:
            one.length += 1
