"""Blocks of GGUF tensors as codes of our formats, or decoded by the package gguf.

A block holds 32 or 256 inputs of a row with their scales. The codes of a type are exact in one of our formats if every
weight is a whole number times a scale: w = q s. Types with a minimum (Q4_1, Q4_K, ...) are w = q s - m and are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import dequantize
from torch import Tensor

from ....experts.packed.formats import Codes
from ..formats.scheme import CodeFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


@dataclass(frozen=True)
class BlockType:
    """A type whose codes are exact: the narrowest format, inputs per scale, dtype of scales, bytes of a block."""

    format: str
    group: int
    scales: torch.dtype
    nbytes: int


EXACT = {
    Type.Q4_0: BlockType("int4", 32, torch.float16, 18),
    Type.Q5_0: BlockType("int8", 32, torch.float16, 22),
    Type.Q8_0: BlockType("int8", 32, torch.float16, 34),
    Type.Q6_K: BlockType("int8", 16, torch.float32, 210),
    Type.IQ4_NL: BlockType("int8", 32, torch.float16, 18),
    Type.MXFP4: BlockType("mxfp4", 32, torch.uint8, 17),
}
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
    if kind == Type.MXFP4:
        if (blocks[:, 0] == 255).any():
            raise ValueError("a scale is 255, the NaN of E8M0; scales must be finite numbers")
        return Codes(_packed(blocks[:, 1:]).view(rows, -1), torch.from_numpy(blocks[:, 0].copy()).view(rows, -1))
    scales = _scales(kind, blocks)
    if not np.isfinite(scales.numpy()).all():
        raise ValueError("a scale is NaN or infinite; scales must be finite numbers")
    times = own.group // (shared.target.group or own.group)
    scales = scales.reshape(rows, -1).to(shared.scales)
    scales = scales if times == 1 else scales.repeat_interleave(times, 1)
    if shared.target.format == "int4":  # of Q4_0 alone; its nibbles are the numbers plus 8
        return Codes(_packed(blocks[:, 2:] ^ np.uint8(0x88)).view(rows, -1), scales)
    return Codes(_numbers(kind, blocks).reshape(rows, -1), scales)


def weights(kind: Type, data: Bytes) -> Tensor:
    """The weights of a tensor of blocks in float32, as the package gguf decodes them; floats keep their dtype."""
    if kind in FLOATS:
        raw = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy())
        return raw.view(FLOATS[kind])
    try:
        return torch.from_numpy(dequantize(np.ascontiguousarray(data), kind))
    except NotImplementedError:
        raise ValueError(f"its type is {kind.name}, which the package gguf cannot decode") from None


def _numbers(kind: Type, blocks: Bytes) -> Tensor:
    """Whole numbers int8 [blocks, inputs]."""
    if kind == Type.Q4_0:
        return torch.from_numpy(_halves(blocks[:, 2:]).view(np.int8) - np.int8(8))
    if kind == Type.Q8_0:
        return torch.from_numpy(blocks[:, 2:].view(np.int8).copy())
    ones = blocks.copy()  # with scales of 1 the package's weights are the whole numbers
    if kind == Type.Q6_K:
        ones[:, 192:208], ones[:, 208:210] = 1, _ONE
    else:
        ones[:, :2] = _ONE
    return torch.from_numpy(dequantize(ones, kind).astype(np.int8))


def _scales(kind: Type, blocks: Bytes) -> Tensor:
    """The scales [blocks, groups]."""
    if kind == Type.Q6_K:
        return _float16(blocks[:, 208:210]).float() * torch.from_numpy(blocks[:, 192:208].view(np.int8).copy())
    return _float16(blocks[:, :2])


def _halves(data: Bytes) -> Bytes:
    """The low nibbles of all bytes, then the high ones."""
    return np.concatenate((data & 15, data >> 4), -1)


def _packed(data: Bytes) -> Tensor:
    """The nibbles of `_halves`, two to a byte, the first one low; in NumPy, on one thread (panels.py says why)."""
    pairs = _halves(data).view(np.uint16)
    return torch.from_numpy((pairs | pairs >> 4).astype(np.uint8))


def _float16(data: Bytes) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(data).view(np.float16))
