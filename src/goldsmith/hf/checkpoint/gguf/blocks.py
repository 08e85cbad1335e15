"""Blocks of GGUF tensors as codes of our formats, or decoded by the package gguf.

A block holds 32 or 256 inputs of a row with their scales. The codes of a type are exact in one of our formats if every
weight is a whole number times a scale: w = q s. Types with a minimum (Q4_1, Q4_K, ...) are w = q s - m and are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import dequantize
from gguf.quants import quant_shape_from_byte_shape
from torch import Tensor

from ....core.native import reason
from ....core.processors import worth
from ....experts._block_codes import BlockCodes
from ....experts.packed.formats import Codes
from ..formats.scheme import CodeFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


@dataclass(frozen=True)
class BlockType:
    """A type whose codes are exact: the narrowest format, inputs per scale, dtype of scales, bytes of a block.

    native  how the native library reads a block as codes of this format
    """

    format: str
    group: int
    scales: torch.dtype
    nbytes: int
    native: BlockCodes | None = None


EXACT = {
    Type.Q4_0: BlockType("int4", 32, torch.float16, 18, BlockCodes(torch.uint8, torch.float16, 0x88)),
    Type.Q5_0: BlockType("int8", 32, torch.float16, 22),
    Type.Q8_0: BlockType("int8", 32, torch.float16, 34, BlockCodes(torch.int8, torch.float16)),
    Type.Q6_K: BlockType("int8", 16, torch.float32, 210),
    Type.IQ4_NL: BlockType("int8", 32, torch.float16, 18),
    Type.MXFP4: BlockType("mxfp4", 32, torch.uint8, 17, BlockCodes(torch.uint8, torch.uint8)),
}
DECODED = (Type.Q4_0, Type.Q8_0)  # types whose weights the native library decodes, too
_SLICE, _LONG = 2**17, 8  # bytes of a slice; the native library takes slices that are so many times as long
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)


@dataclass(frozen=True)
class SharedFormat:
    """The one format that holds several types."""

    target: CodeFormat
    scales: torch.dtype


def shared_format(types: Iterable[Type]) -> SharedFormat | str:
    """The narrowest format that holds all these types exactly, or the reason why there is none."""
    kinds = sorted(set(types))
    names = ", ".join(kind.name for kind in kinds)
    if any(kind not in EXACT for kind in kinds):
        return f"{names}: not every weight is a whole number times a scale"
    known = [EXACT[kind] for kind in kinds]
    formats = {kind.format for kind in known}
    if "mxfp4" in formats and len(formats) > 1:
        return f"{names}: no format holds both"
    scales = {kind.scales for kind in known}
    wide = scales.pop() if len(scales) == 1 else torch.float32
    form = formats.pop() if len(formats) == 1 else "int8"
    return SharedFormat(CodeFormat(form, min(kind.group for kind in known)), wide)


def codes(kind: Type, data: Bytes, shared: SharedFormat) -> Codes:
    """A matrix of blocks [rows, bytes] as codes of a format that holds this type."""
    own, rows = EXACT[kind], data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(-1, own.nbytes)
    if own.native is not None and own.format == shared.target.format and reason() is None:
        numbers, scales, finite = own.native.read(blocks)
    else:
        numbers, scales, finite = _codes_in_numpy(kind, blocks, shared.target.format)
    if not finite:
        what = "255, the NaN of E8M0" if kind == Type.MXFP4 else "NaN or infinite"
        raise ValueError(f"a scale is {what}; scales must be finite numbers")
    times = own.group // (shared.target.group or own.group)
    scales = scales.view(rows, -1).to(shared.scales)
    return Codes(numbers.view(rows, -1), scales if times == 1 else scales.repeat_interleave(times, 1))


def _codes_in_numpy(kind: Type, blocks: Bytes, format: str) -> tuple[Tensor, Tensor, bool]:
    """(codes of each block, scales of each block, whether these are finite)"""
    if kind == Type.MXFP4:
        exponents = torch.from_numpy(blocks[:, 0].copy())
        return torch.from_numpy(_packed(blocks, 1)), exponents, not bool((exponents == 255).any())
    scales = _scales(kind, blocks)
    # int4 holds Q4_0 alone, whose nibbles are the numbers plus 8
    numbers = torch.from_numpy(_packed(blocks, 2) ^ np.uint8(0x88)) if format == "int4" else _numbers(kind, blocks)
    return numbers, scales, bool(np.isfinite(scales.numpy()).all())


def weights(kind: Type, data: Bytes) -> Tensor:
    """The weights of a tensor of blocks in float32, as the package gguf decodes them; floats keep their dtype."""
    if kind in FLOATS:
        raw = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy())
        return raw.view(FLOATS[kind])
    try:
        return _dequantised(kind, np.ascontiguousarray(data))
    except NotImplementedError:
        raise ValueError(f"its type is {kind.name}, which the package gguf cannot decode") from None


def _dequantised(kind: Type, data: Bytes) -> Tensor:
    """The package's numbers; of a large tensor in slices, which stay in the caches, on all cores"""
    rows = data.reshape(-1, data.shape[-1])
    numbers = np.empty(quant_shape_from_byte_shape(rows.shape, kind), np.float32)
    native = EXACT[kind].native if kind in DECODED and reason() is None else None
    step = max(1, (_SLICE if native is None else _LONG * _SLICE) // rows.shape[1])

    def decode(at: int) -> None:
        source, target = rows[at : at + step], numbers[at : at + step]
        if native is not None:
            native.decode(source, target)
        else:  # as one row: the package decodes 16 rows at a time, and between these waits for the GIL
            target.reshape(-1)[:] = dequantize(source.reshape(1, -1), kind)[0]

    if len(rows) <= step:
        decode(0)
    else:
        with ThreadPoolExecutor(worth()) as pool:
            list(pool.map(decode, range(0, len(rows), step)))
    return torch.from_numpy(numbers.reshape(*data.shape[:-1], -1))


def _numbers(kind: Type, blocks: Bytes) -> Tensor:
    """Whole numbers int8 [blocks, inputs]."""
    if kind == Type.Q4_0:
        return torch.from_numpy(_halves(blocks[:, 2:]).view(np.int8) - np.int8(8))
    if kind == Type.Q8_0:
        return torch.from_numpy(_columns(blocks, 2, 34).view(np.int8))
    ones = blocks.copy()  # with scales of 1 the package's weights are the whole numbers
    if kind == Type.Q6_K:
        ones[:, 192:208], ones[:, 208:210] = 1, _ONE
    else:
        ones[:, :2] = _ONE
    return torch.from_numpy(dequantize(ones, kind).astype(np.int8))


def _scales(kind: Type, blocks: Bytes) -> Tensor:
    """The scales [blocks, groups]."""
    if kind == Type.Q6_K:
        return _float16(blocks, 208).float() * torch.from_numpy(_columns(blocks, 192, 208).view(np.int8))
    return _float16(blocks, 0)


def _halves(data: Bytes) -> Bytes:
    """The low nibbles of all bytes, then the high ones."""
    return np.concatenate((data & 15, data >> 4), -1)


def _packed(blocks: Bytes, begin: int) -> Bytes:
    """The nibbles of `_halves` of the 16 bytes from `begin` on, two to a byte, the first one low: [blocks, 16]"""
    pairs = _columns(blocks, begin, begin + 16).view(np.uint16)
    packed = np.empty((len(blocks), 2), np.uint64)
    for half, part in enumerate((pairs & 0x0F0F, pairs >> 4 & 0x0F0F)):
        part |= part >> 4
        packed[:, half] = part.astype(np.uint8).view(np.uint64)[:, 0]
    return packed.view(np.uint8)


def _float16(blocks: Bytes, begin: int) -> Tensor:
    return torch.from_numpy(_columns(blocks, begin, begin + 2).view(np.float16))


def _columns(blocks: Bytes, begin: int, end: int) -> Bytes:
    """A copy of these bytes of all blocks; six times as quick as a copy of the slice, byte by byte"""
    width = f"V{end - begin}"
    form = np.dtype({"names": ["x"], "formats": [width], "offsets": [begin], "itemsize": blocks.shape[1]})
    return blocks.view(form)["x"].copy().view(np.uint8).reshape(len(blocks), -1)
