"""The geometry of an expert's block of bytes, and views of blocks as arguments of kernels.

block   gate, up and down in the packed layout of `goldsmith.experts` (scales and zeros included), then the biases in
        float32. Each part starts at a multiple of 64; the block is zero-padded to a multiple of 4096. One expert is one
        range of bytes, so one copy moves it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...experts import PackedExperts
from ...experts.packed.layout import Expert, Layout, write_expert
from ...experts.packed.panels import ALIGNMENT, up

PAGE = 4096
PACKING, PACKING_VERSION = "goldsmith.experts.panels", 1  # the layout of experts/packed/layout.py; the header names it
_BIAS = torch.float32  # float32 holds the biases of every source exactly


@dataclass(frozen=True)
class ExpertBlocks:
    """Where each part of an expert lies in its block; the same for every block of a store.

    layout    the layout of one expert in `goldsmith.experts`; block i begins at byte i * stride
    biased    the biases that exist: "gate_up_bias", "down_bias" or both
    """

    layout: Layout
    biased: tuple[str, ...]

    @classmethod
    def of(cls, layout: Layout, biased: tuple[str, ...]) -> ExpertBlocks:
        """The geometry for experts of this dense layout."""
        one = replace(layout, num_experts=1, block_bytes=0)
        ends = [end for _, end in _sections(one, biased).values()]
        return cls(replace(one, block_bytes=up(max(ends), PAGE)), biased)

    @property
    def stride(self) -> int:
        """Bytes of a block, and the distance between blocks."""
        return self.layout.block_bytes

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """(begin, end) of each part of a block: gate, up, down, then the existing biases."""
        return _sections(replace(self.layout, block_bytes=0), self.biased)

    def base(self, arena: Tensor) -> PackedExperts:
        """A contiguous arena of n blocks, uint8 [n, stride] or [n * stride] on any device, as PackedExperts; no copy

        The result holds views of the arena, so kernels read whatever is written there later. Create it once and keep
        it. Raises ValueError for another dtype or size, and for memory that does not begin at a multiple of 64.
        """
        if arena.dtype != torch.uint8 or not arena.is_contiguous() or arena.numel() % self.stride or not arena.numel():
            raise ValueError(
                f"ExpertBlocks.base: arena is {arena.dtype} {list(arena.shape)}, expected contiguous uint8 "
                f"[n, {self.stride}]"
            )
        if arena.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"ExpertBlocks.base: arena begins at {arena.data_ptr():#x}, expected a multiple of {ALIGNMENT}"
            )
        rows = arena.detach().view(-1, self.stride)
        biases: dict[str, Tensor] = {name: self.bias(rows, name) for name in self.biased}
        own = self.layout
        return PackedExperts.from_blocks(
            rows, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size, format=own.format,
            group_size=None if own.kind.fixed else own.group_size, scale_dtype=own.scale_dtype, **biases,
        )  # fmt: skip

    def bias(self, arena: Tensor, name: str) -> Tensor:
        """One bias of every block of an arena, float32 [n, size], a view."""
        begin, end = self.sections[name]
        return arena.view(-1, self.stride)[:, begin:end].view(_BIAS)

    def write(self, block: Tensor, expert: Expert, biases: dict[str, Tensor]) -> None:
        """Writes an expert into its block, uint8 [stride], which is zero or holds an expert of the same geometry."""
        write_expert(self.layout, block, block, 0, expert)
        for name in self.biased:
            self.bias(block, name)[0].copy_(biases[name])


def _sections(layout: Layout, biased: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    (wide,), (narrow,) = layout.matrices("gate_up"), layout.matrices("down")
    matrix, down = wide.parts[1], narrow.expert_stride
    sections = {"gate": (0, matrix), "up": (matrix, 2 * matrix), "down": (2 * matrix, 2 * matrix + down)}
    at = 2 * matrix + down
    for name in biased:
        size = (2 * layout.intermediate_size if name == "gate_up_bias" else layout.hidden_size) * _BIAS.itemsize
        sections[name] = (at, at + size)
        at = up(at + size, ALIGNMENT)
    return sections
