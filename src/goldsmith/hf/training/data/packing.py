"""Packs documents into rows, and orders rows for training; a position in the data is a single number."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .documents import Document

UNTRAINED = -100  # a label without loss, torch's default in cross_entropy


@dataclass(frozen=True)
class Batch:
    """Tensors [rows, length]. Positions restart with each document, which keeps documents apart."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor  # the token itself where its prediction has a loss, otherwise UNTRAINED
    tokens: int  # without padding

    @property
    def targets(self) -> int:
        """The number of predictions with a loss."""
        return int((self.labels != UNTRAINED).sum())

    def to(self, device: torch.device | str) -> Batch:
        ids, positions, labels = (t.to(device) for t in (self.input_ids, self.position_ids, self.labels))
        return Batch(ids, positions, labels, self.tokens)


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Best fit, longest first: each document goes to the row that it leaves fullest. Returns indices by row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free places, row), sorted
    for number in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
        size = lengths[number]
        at = bisect_left(room, (size, -1))
        if at == len(room):
            rows.append([number])
            free, row = seq_len - size, len(rows) - 1
        else:
            free, row = room.pop(at)
            rows[row].append(number)
            free -= size
        if free > 1:
            insort(room, (free, row))
    return rows


def batch(rows: Sequence[Sequence[Document]], pad: int) -> Batch:
    """Rows as tensors, padded to the longest; the padding is a document of its own without loss."""
    sizes = [sum(map(len, row)) for row in rows]
    longest = max(sizes)
    ids, positions, labels = (torch.full((len(rows), longest), fill, device="cpu") for fill in (pad, 0, UNTRAINED))
    for k, row in enumerate(rows):
        at = 0
        for document in row:
            end = at + len(document)
            ids[k, at:end] = torch.tensor(document.ids, device="cpu")
            positions[k, at:end] = torch.arange(end - at, device="cpu")
            counts = torch.tensor(document.trained, device="cpu")
            counts[0] = False
            labels[k, at:end] = torch.where(counts, ids[k, at:end], UNTRAINED)
            at = end
        positions[k, at:] = torch.arange(longest - at, device="cpu")
    return Batch(ids, positions, labels, sum(sizes))


class RowStream:
    """An endless sequence of rows: each epoch has its own order, which depends only on seed and epoch."""

    def __init__(self, documents: Sequence[Document], seq_len: int, *, packed: bool, seed: int, pad: int = 0):
        self.documents, self.seed, self.pad = documents, seed, pad
        order = torch.randperm(len(documents), generator=_generator(seed, 0), device="cpu").tolist()
        lengths = [len(documents[k]) for k in order]
        rows = pack(lengths, seq_len) if packed else [[k] for k in range(len(order))]
        self.rows = [[order[k] for k in row] for row in rows]
        self._epoch = (-1, list[int]())

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def highest(self) -> int:
        """The highest token id."""
        return max(max(document.ids) for document in self.documents)

    def batch(self, first: int, count: int) -> Batch:
        """Rows first .. first + count - 1 of the endless sequence."""
        places = [self._place(number) for number in range(first, first + count)]
        return batch([[self.documents[k] for k in self.rows[place]] for place in places], self.pad)

    def _place(self, number: int) -> int:
        epoch, within = divmod(number, len(self.rows))
        if self._epoch[0] != epoch:
            order = torch.randperm(len(self.rows), generator=_generator(self.seed, epoch + 1), device="cpu").tolist()
            self._epoch = (epoch, order)
        return self._epoch[1][within]


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
