"""4-bit floats (E2M1): NVFP4 with E4M3 scales for 16 inputs and one scale for all, and MXFP4 with powers of two for 32.

NVFP4's codes are kept in int8: every E2M1 number is half a whole number, so w = (2 v) (s / 2) holds it exactly.
"""

from __future__ import annotations

from functools import partial

import torch

from ....experts.packed.formats import E2M1, Codes, from_nibbles
from .scheme import Parts, Scheme, check_dtype, check_shape, groups_of

NVFP4_GROUP, MXFP4_GROUP = 16, 32


def nvfp4(label: str, codes: str, overall: str, *, divided: bool) -> Scheme:
    """NVFP4: the scale is weight_scale times the tensor `overall`, or divided by it (compressed-tensors)."""
    read = partial(_nvfp4, codes=codes, overall=overall, divided=divided)
    return Scheme(label, (codes, "weight_scale", overall), read, "int8", NVFP4_GROUP)


def mxfp4(label: str) -> Scheme:
    """MXFP4 as compressed-tensors stores it."""
    return Scheme(label, ("weight_packed", "weight_scale"), _mxfp4, "mxfp4", MXFP4_GROUP)


def _nvfp4(parts: Parts, *, codes: str, overall: str, divided: bool) -> Codes:
    packed, scale, total = parts[codes], parts["weight_scale"], parts[overall]
    check_dtype(codes, packed, torch.uint8)
    check_dtype("weight_scale", scale, torch.float8_e4m3fn)
    check_dtype(overall, total, torch.float32)
    rows, inputs = packed.shape[0], packed.shape[1] * 2
    actual = f"{codes} {list(packed.shape)}"
    check_shape("weight_scale", scale, (rows, groups_of(inputs, NVFP4_GROUP, actual)), actual)
    if total.numel() != 1 or not bool(total.isfinite().all()) or float(total) == 0:
        raise ValueError(f"{overall} is {total.flatten()[:4].tolist()}, expected one number other than 0")
    total = total.reshape(())
    scales = scale.float() / total if divided else scale.float() * total
    halves = scales / 2
    if not bool((halves * 2 == scales).all()):
        raise ValueError(f"weight_scale and {overall} give a scale that is NaN or below float32's normal numbers")
    doubled = torch.tensor([round(2 * value) for value in E2M1], dtype=torch.int8, device=packed.device)
    return Codes(doubled[from_nibbles(packed).int()], halves)


def _mxfp4(parts: Parts) -> Codes:
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    check_dtype("weight_packed", packed, torch.uint8)
    check_dtype("weight_scale", scale, torch.uint8, torch.float8_e8m0fnu)
    rows, inputs = packed.shape[0], packed.shape[1] * 2
    actual = f"weight_packed {list(packed.shape)}"
    check_shape("weight_scale", scale, (rows, groups_of(inputs, MXFP4_GROUP, actual)), actual)
    exponents = scale.contiguous().view(torch.uint8)
    if bool((exponents == 255).any()):
        raise ValueError("weight_scale holds 255, the NaN of E8M0; scales must be finite numbers")
    return Codes(packed.contiguous(), exponents)
