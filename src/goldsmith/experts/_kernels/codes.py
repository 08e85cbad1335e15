"""Weights out of a packed panel's words, in Triton: what experts/layout.py lays out and experts/formats.py decodes."""

import triton
import triton.language as tl

FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, "int4_asym": 4, "mxfp4": 5, "fp8_block": 6}


@triton.jit
def weight(words, J: tl.constexpr, FORMAT: tl.constexpr):
    """The code of input J of each word, as a number in float32, without scale and zero point."""
    if FORMAT == 0:
        value = words.to(tl.float32, bitcast=True)
    elif FORMAT == 1:
        bits = (words << 16) if J == 0 else (words & -65536)
        value = bits.to(tl.float32, bitcast=True)
    elif FORMAT == 2:
        value = ((words << (24 - 8 * J)) >> 24).to(tl.float32)
    elif FORMAT == 6:
        byte = (words >> (8 * J)) & 255
        e, m = (byte >> 3) & 15, byte & 7
        normal = ((e + 120) << 23) | (m << 20)  # E4M3's bias is 7, float32's 127
        size = tl.where(e > 0, normal.to(tl.float32, bitcast=True), m.to(tl.float32) * 0.001953125)
        size = tl.where((byte & 127) == 127, float("nan"), size)
        value = tl.where(byte > 127, -size, size)
    else:
        SHIFT: tl.constexpr = 4 * (J // 2) + 16 * (J % 2)
        code = (words >> SHIFT) & 15
        if FORMAT == 3:
            value = ((code ^ 8) - 8).to(tl.float32)
        elif FORMAT == 4:
            value = code.to(tl.float32)
        else:
            low, exponent = code & 1, (code >> 1) & 3
            bits = ((exponent + 126) << 23) | (low << 22)
            size = tl.where(exponent > 0, bits.to(tl.float32, bitcast=True), low.to(tl.float32) * 0.5)
            value = tl.where(code > 7, -size, size)
    return value


@triton.jit
def scaled(value, panel_ptr, k, n, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
           FORMAT: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """(value - zero) * scale of the inputs k [K, 1] and of row n [1, N] of each panel (panel_ptr [1, N], bytes)."""
    if SCALE != 0:
        group = k // GROUP
        if FORMAT == 6:
            at = panel_ptr + SCALES + group * 4 + 0 * n
            scale = tl.load(at.to(tl.pointer_type(tl.float32)))
        elif SCALE == 1:
            scale = tl.load((panel_ptr + SCALES + (group * 16 + n) * 4).to(tl.pointer_type(tl.float32)))
        elif SCALE == 2:
            scale = tl.load((panel_ptr + SCALES + (group * 16 + n) * 2).to(tl.pointer_type(tl.bfloat16)))
        elif SCALE == 3:
            scale = tl.load((panel_ptr + SCALES + (group * 16 + n) * 2).to(tl.pointer_type(tl.float16)))
        else:
            e = tl.load((panel_ptr + SCALES + group * 16 + n).to(tl.pointer_type(tl.uint8))).to(tl.int32)
            bits = tl.where(e > 0, e << 23, 1 << 22)  # 2^(e - 127); 2^-127 is below the normal numbers
            scale = bits.to(tl.float32, bitcast=True)
        if FORMAT == 4:
            byte = tl.load((panel_ptr + ZEROS + group * 8 + n % 8).to(tl.pointer_type(tl.uint8))).to(tl.int32)
            value -= ((byte >> (4 * (n // 8))) & 15).to(tl.float32)
        value *= scale.to(tl.float32)
    return value
