"""Codes of 2, 4 or 8 bits in int32 words."""

from __future__ import annotations

import torch
from torch import Tensor

from ....experts.packed.formats import nibbles


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits]: number i of a word is its bits from bits * i on."""
    data = words.contiguous().view(torch.uint8)  # little-endian: the lowest bits come first
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    return ((data.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def signed(numbers: Tensor, bits: int) -> Tensor:
    """The codes of int4 (bits 2 and 4) or int8 (bits 8) for unsigned numbers q + 2^(bits - 1)."""
    if bits == 8:
        return (numbers ^ 128).view(torch.int8)
    # -2^(bits - 1) in two's complement of 4 bits: adding 16 - 2^(bits - 1) modulo 16
    return nibbles(((numbers + (16 - (1 << (bits - 1)))) & 15).contiguous())


def unsigned(numbers: Tensor) -> Tensor:
    """The codes of int4_asym for numbers of at most 4 bits."""
    return nibbles(numbers.contiguous())
