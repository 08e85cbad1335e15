"""Decodes the words of packed panels in Triton (layout: packed/layout.py, formats: packed/formats.py).

A code's bits are moved to the sign, exponent and mantissa of a float32; one product or difference completes the value:
three or four operations per weight. Intermediate values can be subnormal float32 numbers, which a GPU supports.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..packed.layout import Layout

FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, "int4_asym": 4, "mxfp4": 5, "fp8_block": 6}
_SCALES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4}


@dataclass(frozen=True)
class Constants:
    """Launch constants of a projection in a block: its start, bytes of a panel, and the kernels' constants

    PER, FORMAT, SCALE, GROUP, SCALES, ZEROS: inputs per word, format, dtype of the scales (0: none), inputs per
    scale, and the starts of scales and zeros in a panel.
    """

    at: int
    panel: int
    of_format: tuple[int, int, int, int, int, int]


def constants(layout: Layout, which: str) -> Constants:
    (place,) = layout.matrices(which)
    group = (layout.group_size or place.inputs) if place.groups else 1
    scale = _SCALES[layout.scale_dtype]
    of_format = (layout.kind.per_word, FORMATS[layout.format], scale, group, place.scales_at, place.zeros_at)
    return Constants(place.offset, place.panel_bytes, of_format)


@triton.jit
def weight(words, zero, J, FORMAT: tl.constexpr):
    """The code of input J of each word as an unscaled float32, minus its zero point for int4_asym

    J: a number, or a tensor that broadcasts with `words`.
    """
    if FORMAT == 0:
        value = words.to(tl.float32, bitcast=True)
    elif FORMAT == 1:
        value = ((words << (16 - 16 * J)) & -65536).to(tl.float32, bitcast=True)
    elif FORMAT == 2:
        value = ((words << (24 - 8 * J)) >> 24).to(tl.float32)
    elif FORMAT == 6:
        top = words << (24 - 8 * J)
        # 2^120 corrects the difference between the biases of E4M3 (7) and float32 (127)
        value = ((top >> 4) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where((top & 2130706432) == 2130706432, float("nan"), value)
    else:
        shift = 4 * (J // 2) + 16 * (J % 2)
        if FORMAT == 5:
            top = words << (28 - shift)  # E2M1's bias is 1
            value = ((top >> 6) & -2118123520).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        elif FORMAT == 3:  # the bits of 2^23 + (code ^ 8) in float32
            value = (((words >> shift) & 15) ^ 0x4B000008).to(tl.float32, bitcast=True) - 8388616.0
        else:
            value = (((words >> shift) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    return value


@triton.jit
def spread(words, zero, WORDS: tl.constexpr, OUTPUTS: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr):
    """words [WORDS, OUTPUTS] -> [WORDS, PER, OUTPUTS]: `weight` of each input."""
    each = tl.arange(0, PER)[None, :, None]
    return weight(tl.broadcast_to(words[:, None, :], (WORDS, PER, OUTPUTS)), zero, each, FORMAT)


@triton.jit
def scale_of(panel_ptr, group, n, inside, SCALES: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr):
    """The scale of each group and row n of a panel (panel_ptr, in bytes) in float32; 0 outside. SCALE is not 0."""
    at = panel_ptr + SCALES
    if FORMAT == 6:
        scale = tl.load(at.to(tl.pointer_type(tl.float32)) + group, inside, 0.0)  # one for all 16 rows
    elif SCALE == 1:
        scale = tl.load(at.to(tl.pointer_type(tl.float32)) + group * 16 + n, inside, 0.0)
    elif SCALE == 2:
        scale = tl.load(at.to(tl.pointer_type(tl.bfloat16)) + group * 16 + n, inside, 0.0)
    elif SCALE == 3:
        scale = tl.load(at.to(tl.pointer_type(tl.float16)) + group * 16 + n, inside, 0.0)
    else:
        e = tl.load(at.to(tl.pointer_type(tl.uint8)) + group * 16 + n, inside, 0).to(tl.int32)
        bits = tl.where(e > 0, e << 23, 1 << 22)  # 2^(e - 127); 2^-127 is subnormal
        scale = bits.to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def zero_of(panel_ptr, group, n, inside, ZEROS: tl.constexpr):
    """The zero point of each group and row in float32, for int4_asym only."""
    spot = (panel_ptr + ZEROS + group * 8 + n % 8).to(tl.pointer_type(tl.uint8))
    return ((tl.load(spot, inside, 0).to(tl.int32) >> (4 * (n // 8))) & 15).to(tl.float32)
