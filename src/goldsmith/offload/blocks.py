"""Blocks: where the parts of an expert lie in its bytes, and how such bytes become the arguments of kernels.

block   gate, up and down in the packed layout of `goldsmith.experts` (scales and zeros inside), then the biases in
        float32, each part at a multiple of 64; zero bytes up to a multiple of 4096. One expert is one range, one copy
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..experts import PackedExperts
from ..experts.packed.layout import ALIGNMENT, Expert, Layout, up, write_expert

PAGE = 4096
PACKING, PACKING_VERSION = "goldsmith.experts.panels", 1  # what experts/packed/layout.py describes; the header names it
_BIAS = torch.float32  # exact for every source


@dataclass(frozen=True)
class Blocks:
    """The geometry of every block of a store.

    layout    of one expert, as `goldsmith.experts` has it, an expert in every `stride` bytes
    biased    which of "gate_up_bias" and "down_bias" there are
    """

    layout: Layout
    biased: tuple[str, ...]

    @classmethod
    def of(cls, layout: Layout, biased: tuple[str, ...]) -> Blocks:
        """The geometry of experts of this (dense) layout."""
        one = replace(layout, num_experts=1, block_bytes=0)
        ends = [end for _, end in _sections(one, biased).values()]
        return cls(replace(one, block_bytes=up(max(ends), PAGE)), biased)

    @property
    def stride(self) -> int:
        """Bytes of a block, and from block to block."""
        return self.layout.block_bytes

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """(begin, end) of each part in a block: gate, up, down, and the biases that there are."""
        return _sections(replace(self.layout, block_bytes=0), self.biased)

    def base(self, arena: Tensor) -> PackedExperts:
        """Blocks side by side, uint8 [n, stride] or [n * stride] on any device, as the base of n experts; no copy

        It holds views of the arena: what is written there later is what kernels read. Make it once and keep it.
        Raises ValueError for another dtype or size, and for memory that does not begin at a multiple of 64.
        """
        if arena.dtype != torch.uint8 or not arena.is_contiguous() or arena.numel() % self.stride or not arena.numel():
            raise ValueError(
                f"Blocks.base: arena is {arena.dtype} {list(arena.shape)}, wanted contiguous uint8 [n, {self.stride}]"
            )
        if arena.data_ptr() % ALIGNMENT:
            raise ValueError(f"Blocks.base: arena begins at {arena.data_ptr():#x}, wanted a multiple of {ALIGNMENT}")
        rows = arena.detach().view(-1, self.stride)
        biases: dict[str, Any] = {name: self.bias(rows, name) for name in self.biased}
        own = self.layout
        return PackedExperts.from_blocks(
            rows, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size, format=own.format,
            group_size=None if own.kind.fixed else own.group_size, scale_dtype=own.scale_dtype, **biases,
        )  # fmt: skip

    def bias(self, arena: Tensor, name: str) -> Tensor:
        """A bias of every block of an arena, float32 [n, size], a view."""
        begin, end = self.sections[name]
        return arena.view(-1, self.stride)[:, begin:end].view(_BIAS)

    def write(self, block: Tensor, expert: Expert, biases: dict[str, Tensor]) -> None:
        """An expert into its block (uint8 [stride]), which is zero, or holds another one written so."""
        write_expert(self.layout, block, block, 0, expert)
        for name in self.biased:
            self.bias(block, name)[0].copy_(biases[name])


def _sections(layout: Layout, biased: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    (wide,), (narrow,) = layout.matrices("gate_up"), layout.matrices("down")
    matrix, down = wide.parts[1], narrow.expert_stride
    found = {"gate": (0, matrix), "up": (matrix, 2 * matrix), "down": (2 * matrix, 2 * matrix + down)}
    at = 2 * matrix + down
    for name in biased:
        size = (2 * layout.intermediate_size if name == "gate_up_bias" else layout.hidden_size) * _BIAS.itemsize
        found[name] = (at, at + size)
        at = up(at + size, ALIGNMENT)
    return found
