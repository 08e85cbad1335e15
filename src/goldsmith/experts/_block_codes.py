"""Blocks of a scale and 32 codes, as GGUF files hold them, read by gs_read_blocks: one call, without the GIL."""

from __future__ import annotations

from ctypes import byref, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.native import Structure, check, library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]  # NumPy's, because torch warns of a file that is mapped to be read
    Floats = NDArray[np.float32]

CODES = 32  # of a block


class BlockArgs(Structure):
    _c_name_ = "gs_block_args"
    _fields_ = [
        ("size", c_size_t),
        ("blocks", c_void_p),
        *((name, c_int64) for name in ("count", "block_bytes", "scale_bytes", "nibbles", "flip")),
        *((name, c_void_p) for name in ("codes", "scales", "numbers")),
        ("infinite", c_int64),
    ]


@dataclass(frozen=True)
class BlockCodes:
    """A kind of block: a scale, then codes.

    codes   int8, or uint8 for two codes in a byte: first the low nibbles of all bytes, then the high ones
    scales  float16, or uint8 for E8M0
    flip    exclusive or of two codes, from the block's to ours
    """

    codes: torch.dtype
    scales: torch.dtype
    flip: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.scales.itemsize + self._code_bytes

    @property
    def _code_bytes(self) -> int:
        return CODES // 2 if self.codes == torch.uint8 else CODES

    def read(self, blocks: Bytes) -> tuple[Tensor, Tensor, bool]:
        """(codes [blocks, bytes], scales [blocks], whether these are finite) of contiguous bytes"""
        args = self._args(blocks)
        codes = torch.empty(args.count, self._code_bytes, dtype=self.codes, device="cpu")
        scales = torch.empty(args.count, dtype=self.scales, device="cpu")
        args.codes, args.scales = codes.data_ptr(), scales.data_ptr()
        check(library().gs_read_blocks(byref(args)))
        return codes, scales, not args.infinite

    def decode(self, blocks: Bytes, numbers: Floats) -> None:
        """Writes the weights: int8, or a code less 8, times the scale in float16."""
        args = self._args(blocks)
        if numbers.dtype != "f4" or not numbers.flags.c_contiguous or numbers.size != args.count * CODES:
            raise ValueError(
                f"numbers are {numbers.dtype} {list(numbers.shape)}, expected {args.count} blocks in float32"
            )
        args.numbers = numbers.ctypes.data
        check(library().gs_read_blocks(byref(args)))

    def _args(self, blocks: Bytes) -> BlockArgs:
        if blocks.dtype != "u1" or not blocks.flags.c_contiguous or blocks.size % self.nbytes:
            raise ValueError(
                f"blocks are {blocks.dtype} {list(blocks.shape)}, expected contiguous bytes, {self.nbytes} a block"
            )
        return BlockArgs(
            blocks=blocks.ctypes.data, count=blocks.size // self.nbytes, block_bytes=self.nbytes,
            scale_bytes=self.scales.itemsize, nibbles=int(self.codes == torch.uint8), flip=self.flip,
        )  # fmt: skip
