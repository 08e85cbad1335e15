"""The (token, expert) pairs of a routing, as the reference reads them: by token, by expert, without skipped ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ._common import can_inspect, chunk_bytes


class Pairs:
    """indices [..., K] of N experts as [T, K]. -1 is skipped; any other index out of range is too, and loses its token.

    A lost token's results are NaN.
    """

    def __init__(self, indices: Tensor, n: int) -> None:
        flat = indices.reshape(math.prod(indices.shape[:-1]), indices.shape[-1]).long()
        self.n, self.shape = n, flat.shape
        self.skipped = (flat < 0) | (flat >= n)
        self.at = flat.masked_fill(self.skipped, 0)
        self._wrong = (flat < -1) | (flat >= n)
        self.lost = self._wrong.any(-1, keepdim=True)
        self._inspectable = can_inspect(flat)
        self._holes = not self._inspectable or bool(self.skipped.any())
        self._indices = indices

    def raise_if_out_of_range(self) -> None:
        """Raises IndexError on a CPU. On a GPU, which would have to wait, and under vmap the token becomes NaN."""
        if self._inspectable and bool(self._wrong.any()):
            place = tuple(int(i) for i in self._wrong.view(self._indices.shape).nonzero()[0])
            raise IndexError(
                f"router.atomic_experts: indices{list(place)} is {int(self._indices[place])}, expected -1 (skipped) or "
                f"0 <= index < N = {self.n}"
            )

    def kept(self, values: Tensor) -> Tensor:
        """values [T, K] with 0 for skipped pairs, also where the value is NaN or Inf."""
        return values.masked_fill(self.skipped, 0.0)

    def chunks(self, width: int) -> Iterator[slice]:
        """Slices of tokens whose experts' rows of `width` float32 numbers fit a chunk."""
        size = max(1, chunk_bytes(self.at.device) // (8 * width * max(1, self.shape[1])))
        return (slice(first, first + size) for first in range(0, max(1, self.shape[0]), size))

    def rows(self, table: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
        """[tokens, K, width]: the experts' rows, with 0 for skipped pairs."""
        at = self.at[tokens]
        rows = table.index_select(0, at.reshape(-1)).to(dtype).view(*at.shape, table.shape[1])
        return rows.masked_fill(self.skipped[tokens].unsqueeze(-1), 0.0) if self._holes else rows

    @functools.cached_property
    def by_expert(self) -> tuple[Tensor, Tensor, Tensor]:
        """(position, expert, token) of every pair, sorted by expert, then by (t, j); skipped pairs have expert N."""
        expert, place = self.at.masked_fill(self.skipped, self.n).view(-1).sort(stable=True)
        return place, expert, place // max(1, self.shape[1])

    def parts(self, width: int, first: int, last: int) -> Iterator[slice]:
        """Slices of the pairs from first to last that fit a chunk with `width` numbers per pair."""
        size = max(1, chunk_bytes(self.at.device) // (16 * width))
        return (slice(at, min(at + size, last)) for at in range(first, last, size))
