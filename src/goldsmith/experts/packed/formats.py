"""The formats of packed weights: bits of a code, codes of a word, and the value of each code.

`Codes` is a matrix [rows, inputs] without tiles, as files, importers and the quantiser use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FP8_BLOCK = 128  # fp8_block has a scale for every 128 rows x 128 inputs; the last block of a side may be smaller

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Format:
    """One format: bits of a code, its storage dtype, allowed dtypes of scales (the first is the default), and group.

    Four-bit codes are stored two in a byte, the even input in the low nibble. `group` is the default number of inputs
    per scale; None means one scale per row. `fixed`: no other group is allowed. `zeros`: every group has a zero point.
    """

    name: str
    bits: int
    codes: torch.dtype
    scales: tuple[torch.dtype, ...] = ()
    group: int | None = None
    fixed: bool = False
    zeros: bool = False

    @property
    def per_word(self) -> int:
        """Codes in a word of 32 bits."""
        return 32 // self.bits

    @property
    def per_code(self) -> int:
        """Weights in an element of `codes`."""
        return 2 if self.bits == 4 else 1


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 32, torch.float32, fixed=True),
        Format("bf16", 16, torch.bfloat16, fixed=True),
        Format("int8", 8, torch.int8, _FLOATS),
        Format("int4", 4, torch.uint8, (torch.bfloat16, torch.float16, torch.float32), 32),
        Format("int4_asym", 4, torch.uint8, (torch.float16, torch.bfloat16, torch.float32), 128, zeros=True),
        Format("mxfp4", 4, torch.uint8, (torch.uint8,), 32, fixed=True),
        Format("fp8_block", 8, torch.float8_e4m3fn, (torch.float32,), FP8_BLOCK, fixed=True),
    )
}

SCALE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "e8m0"}


@dataclass(frozen=True)
class Codes:
    """A matrix of weights [rows, inputs] in its format.

    codes   [rows, inputs / per_code] in the format's dtype
    scales  [rows, groups]; fp8_block: [ceil(rows / 128), ceil(inputs / 128)]; None for fp32 and bf16
    zeros   [rows, groups] uint8, for int4_asym only
    """

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None


def decode(fmt: Format, matrix: Codes, dtype: torch.dtype = torch.float32) -> Tensor:
    """w = value(code) * scale, (code - zero) * scale for int4_asym: [rows, inputs], rounded once to `dtype`

    Exact in float64, and in float32 unless the scales are float32.
    """
    if matrix.scales is None:
        return matrix.codes.to(dtype)
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float64
    values = code_values(fmt, matrix.codes, wide)
    rows, inputs = values.shape
    scales = scale_values(matrix.scales, wide)
    if fmt.name == "fp8_block":
        every = scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :inputs]
        return values.mul_(every).to(dtype)
    if inputs == 0:
        return values.to(dtype)
    grouped = values.view(rows, scales.shape[1], -1)
    if matrix.zeros is not None:
        grouped.sub_(matrix.zeros.to(wide).unsqueeze(-1))
    return grouped.mul_(scales.unsqueeze(-1)).view(rows, inputs).to(dtype)


def code_values(fmt: Format, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of each code without its scale: [rows, inputs], a new tensor"""
    if fmt.bits != 4:
        return codes.to(dtype, copy=True)
    pairs = _pairs(fmt.name, dtype, codes.device).index_select(0, codes.reshape(-1).int())
    return pairs.view(codes.shape[0], -1)


def scale_values(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as a number: itself, or 2^(e - 127) for an E8M0 byte e"""
    if scales.dtype != torch.uint8:
        return scales.to(dtype)
    return torch.exp2(scales.to(torch.float64) - 127).to(dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # an integer dtype by its number of bytes


@cache
def _pairs(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of both nibbles of every byte: [256, 2]"""
    signed = [*range(8), *range(-8, 0)]
    numbers = {"int4": signed, "int4_asym": list(range(16)), "mxfp4": list(E2M1)}[name]
    return torch.tensor([[numbers[b & 15], numbers[b >> 4]] for b in range(256)], dtype=dtype, device=device)


def nibbles(codes: Tensor) -> Tensor:
    """[..., n] values 0..15 -> [..., n / 2] bytes, even elements in the low nibbles"""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def from_nibbles(packed: Tensor) -> Tensor:
    """[..., n / 2] bytes -> [..., n] values 0..15, the low nibble first"""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def side_by_side(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors of one dtype bit for bit, as integers of the same width

    Not every version of torch concatenates float8, and under autocast none concatenates float16 on a CPU.
    """
    return torch.cat([part.view(_BITS[part.dtype.itemsize]) for part in parts], dim).view(parts[0].dtype)


def divisors(number: int, step: int = 8) -> list[int]:
    """The multiples of `step` that divide `number`, ascending"""
    return [d for d in range(step, number + 1, step) if number % d == 0]
