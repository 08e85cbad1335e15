"""Bit patterns of unwritten memory: of guard bands, and of uninitialised bodies.

Each buffer's bands have their own pattern, so that a band copied over another one is detected. For example, a kernel
without its mask loads beyond an input and stores beyond its output. The pattern survives, because NaN + NaN, NaN * 2
and a copy all keep the bits of NaN.

    bfloat16, float16    0xFFC0 | p                            p: 6 bits, the buffer's own
    float32              0xFFFB  0xFFC0 | p                    the highest 16 bits first
    float64              0xFFFB  0xFFFB  0xFFFB  0xFFC0 | p    complex: its parts
    others               a small negative number, such as -1 for an input

With the finite "dirt" fill, bands of the candidate's buffers hold -0: NaN + 0 keeps its bits, which would hide a kernel
that adds a masked 0 to its neighbour's memory.

All marks of floats are quiet NaNs that arithmetic does not produce, in whatever width they are read: arithmetic
produces 0x7FC0, 0xFFC0, 0xFFF8 and 0x7FFF, and vectorised code 0xFFFF. A mark that is converted to another width
matches no mark of that width.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
from torch import Tensor

from ..support.device_flags import Flag

NAN_FILL, DIRT_FILL, ZERO_FILL = "nan", "dirt", "zero"
_CACHE_BYTES, _CACHE_FUNCTION = 32 << 20, "get_empty_cache_for_benchmark"  # of Triton's drivers
HEAD, NAN16 = 0xFFFB, 0xFFC0
POISON = 0xFFFD - 0x10000  # fills bodies, as int16
# every p but those of arithmetic's results (0x00, 0x38, 0x3F), of the poison (0x3D), of the head (0x3B), and of float32
# and float64 marks converted to float16 (0x1F)
_PATTERNS = [p for p in range(64) if p not in (0x00, 0x1F, 0x38, 0x3B, 0x3D, 0x3F)]
_INPUT_MARKS = 18  # the first 18 are for inputs and output gradients, the others for buffers of the candidate
# small, so that an integer used as an index stays near; no sum of two of the first equals one of the others
_NUMBERS = {True: (-1, -3), False: (-11, -13)}
_UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def band_mark(dtype: torch.dtype, number: int, for_input: bool) -> tuple[int, torch.dtype]:
    """(value of the bands of a buffer, its unit); number: index of the buffer among those of its kind.

    for_input: the buffer is an input or an output gradient; its marks differ from those of other buffers.
    """
    real = dtype.to_real() if dtype.is_complex else dtype
    unit = _UNITS[real.itemsize]
    if not wide(dtype):
        numbers = (-1,) if for_input and real.is_floating_point else _NUMBERS[for_input]  # 0xFF is NaN in 8 bits
        return numbers[number % len(numbers)], unit
    own = (
        _PATTERNS[number % _INPUT_MARKS]
        if for_input
        else _PATTERNS[_INPUT_MARKS + number % (len(_PATTERNS) - _INPUT_MARKS)]
    )
    bits = NAN16 | own
    for place in range(1, real.itemsize // 2):
        bits |= HEAD << 16 * place
    return bits - (1 << 8 * real.itemsize), unit


def zero_mark(dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(value, unit) of bands that hold -0, for a `wide` dtype; -0 + 0 is 0."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return -(1 << 8 * real.itemsize - 1), _UNITS[real.itemsize]


def wide(dtype: torch.dtype) -> bool:
    """Whether a dtype has enough NaN patterns to give each buffer its own."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def fill_body(body: Tensor, dtype: torch.dtype, fill: str) -> None:
    """Fills a body with zeros, poison (NaN; 0x7f7f... for integers) or plausible dirt (48.6 in float32)."""
    floating = dtype.is_floating_point or dtype.is_complex
    if fill == ZERO_FILL:
        body.zero_()
    elif dtype == torch.bool:
        body.fill_(1 if fill == NAN_FILL else 0)
    elif fill == NAN_FILL and wide(dtype):
        body.view(torch.int16).fill_(POISON)
    elif fill == NAN_FILL:
        body.fill_(0xFF if floating else 0x7F)
    else:
        body.fill_(0x42 if floating else 0x01)


def no_nan(tensor: Tensor) -> Flag:
    """Whether a tensor cannot hold a mark, because it has no NaN or marks of its dtype are none. No wait for a GPU."""
    if not wide(tensor.dtype) or tensor.is_complex():
        return True
    none = ~torch.isnan(tensor).any()
    return none if tensor.is_cuda else bool(none)


def poison_left(tensor: Tensor) -> Tensor | None:
    """Mask of the elements that still hold the poison of uninitialised memory, or None."""
    return None if bool(no_nan(tensor)) else _some((_units(tensor) == POISON).all(-1))


def band_read(tensor: Tensor) -> Tensor | None:
    """Mask of the elements that hold bytes of any guard band, or None; in 16 bits also truncated float32 marks."""
    if bool(no_nan(tensor)):
        return None
    units = _units(tensor)
    head = units == HEAD - 0x10000
    if units.shape[-1] == 1:
        return _some((head | _is_own(units))[..., 0])
    return _some(head[..., 1:].all(-1) & _is_own(units[..., 0]))


def _units(tensor: Tensor) -> Tensor:
    """The 16-bit units of each element, lowest first."""
    return tensor.contiguous().unsqueeze(-1).view(torch.int16)


def _is_own(units: Tensor) -> Tensor:
    known = torch.zeros(64, dtype=torch.bool, device=units.device)
    known[_PATTERNS] = True
    return (units & 0xFFC0 - 0x10000 == NAN16 - 0x10000) & known[(units & 63).long()]


def _some(mask: Tensor) -> Tensor | None:
    return mask if bool(mask.any()) else None


def clears_caches(tensor: Tensor) -> bool:
    """Whether Triton makes this tensor to clear a GPU's caches before it times a configuration; no kernel gets it."""
    if tensor.nbytes < _CACHE_BYTES:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _CACHE_FUNCTION:
        frame = frame.f_back
    return frame is not None and f"{os.sep}triton{os.sep}" in frame.f_code.co_filename
