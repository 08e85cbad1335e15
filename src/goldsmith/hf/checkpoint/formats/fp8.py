"""8-bit floats (E4M3): w = q s, with a scale for a block, a row or the whole matrix.

Blocks of 128 x 128, and one scale for all, are codes of fp8_block; a scale for each row is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....experts.packed.formats import FP8_BLOCK, Codes
from .scheme import Parts, Scheme, check_dtype, check_shape, grown

E4M3 = torch.float8_e4m3fn
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
PER_ROW = "fp8_block has no scale for each row"


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """The scheme of an "fp8" quantization_config: DeepSeek-V3's blocks, or one scale for each matrix."""
    if settings.get("fmt", "e4m3") not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(f"fp8 in {settings['fmt']}; supported is e4m3")
    block = list(settings.get("weight_block_size") or [])
    aliases = {"weight_scale": "weight_scale_inv"}  # vLLM's name; both are multiplied
    if not block:
        return tensorwise("fp8 (one scale for each matrix)", "weight_scale_inv", aliases)
    return blockwise("fp8", block, "weight_scale_inv", aliases)


def tensorwise(label: str, scale: str, aliases: Mapping[str, str] | None = None) -> Scheme:
    """One scale for the whole matrix."""
    return Scheme(label, ("weight", scale), partial(_one, name=scale), "fp8_block", aliases=aliases or {})


def blockwise(label: str, block: list[int], scale: str, aliases: Mapping[str, str] | None = None) -> Scheme:
    """A scale for each block of rows and inputs."""
    if len(block) != 2 or not all(isinstance(side, int) and side > 0 for side in block):
        raise ValueError(f"{label} in blocks of {block}; expected two sizes, of rows and inputs")
    label = f"{label} (blocks of {block[0]} x {block[1]})"
    own = block == [FP8_BLOCK, FP8_BLOCK]
    read = partial(_blocks, name=scale, block=block)
    reason = "" if own else f"fp8_block has blocks of {FP8_BLOCK} x {FP8_BLOCK}"
    form, group = ("fp8_block", FP8_BLOCK) if own else (None, None)
    return Scheme(label, ("weight", scale), read, form, group, reason, aliases=aliases or {})


def rowwise(label: str, scale: str, group: int | None = None) -> Scheme:
    """A scale for each row, or for each group of inputs in it."""
    return Scheme(label, ("weight", scale), partial(_rows, name=scale, group=group), reason=PER_ROW)


def _one(parts: Parts, name: str) -> Codes:
    weight, scale = _checked(parts, name)
    if scale.numel() != 1:
        raise ValueError(f"{name} is {list(scale.shape)}, expected one scale for the whole matrix")
    blocks = (-(-weight.shape[0] // FP8_BLOCK), -(-weight.shape[1] // FP8_BLOCK))
    return Codes(weight, scale.float().reshape(1, 1).expand(blocks).contiguous())


def _blocks(parts: Parts, name: str, block: list[int]) -> Codes | Tensor:
    weight, scale = _checked(parts, name)
    blocks = (-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
    check_shape(name, scale, blocks, f"weight {list(weight.shape)}")
    scale = scale.float().contiguous()
    if block == [FP8_BLOCK, FP8_BLOCK]:
        return Codes(weight, scale)
    every = scale.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)
    return weight.float() * every[:, : weight.shape[1]]


def _rows(parts: Parts, name: str, group: int | None) -> Tensor:
    weight, scale = _checked(parts, name)
    rows, inputs = weight.shape
    if group is None and scale.dim() == 1:  # ModelOpt and fbgemm store a vector
        scale = scale.unsqueeze(1)
    check_shape(name, scale, (rows, 1 if group is None else -(-inputs // group)), f"weight {list(weight.shape)}")
    return weight.float() * grown(scale.float(), inputs)


def _checked(parts: Parts, name: str) -> tuple[Tensor, Tensor]:
    weight, scale = parts["weight"], parts[name]
    check_dtype("weight", weight, E4M3)
    check_dtype(name, scale, *SCALES)
    nan = (weight.contiguous().view(torch.uint8) & 0x7F) == 0x7F
    if nan.any():
        raise ValueError(f"weight is nan at {nan.nonzero()[0].tolist()}; weights must be finite numbers")
    return weight.contiguous(), scale
