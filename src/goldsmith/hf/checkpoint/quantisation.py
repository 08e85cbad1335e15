"""Quantised checkpoints: which kinds are supported, and decoding a linear layer's weight.

Experts keep their codes and go through the importers of `goldsmith.experts`. Only the linear layers around them are
decoded here, because the model holds these as plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PARTS = ("weight", "weight_scale_inv", "weight_packed", "weight_scale", "weight_shape", "qweight", "qzeros", "scales")
CODED_PARTS = {"weight_scale_inv", "weight_packed", "qweight"}  # a name with one of these parts is stored as codes
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # bits 4i of word c hold column 8c + AWQ_ORDER[i]
FP8_BLOCK = 128


def unsupported_reason(method: str, settings: Mapping[str, Any]) -> str | None:
    """Why a checkpoint with these quantisation settings is not supported, or None if it is."""
    if method == "compressed-tensors":
        if settings.get("format") != "pack-quantized":
            return (
                f"compressed-tensors format {settings.get('format')!r}; supported is 'pack-quantized' (Kimi-K2's int4)"
            )
        for group in (settings.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            if weights.get("num_bits") != 4 or weights.get("symmetric") is False or weights.get("actorder"):
                return f"compressed-tensors weights of {weights}; supported are 4 bits, symmetric, without actorder"
    elif method == "awq":
        version = str(settings.get("version", "gemm")).lower()
        if settings.get("bits", 4) != 4 or version != "gemm" or settings.get("zero_point") is False:
            return f"AWQ of {dict(settings)}; supported are bits 4, version 'gemm', zero_point true"
    elif method == "fp8":
        block = list(settings.get("weight_block_size") or [])
        if block != [FP8_BLOCK, FP8_BLOCK]:
            return f"fp8 with weight_block_size {block or None}; supported are blocks of {FP8_BLOCK} x {FP8_BLOCK}"
    return None


def decode(method: str, parts: Mapping[str, Tensor], name: str) -> Tensor:
    """w [out, in] in float32 of one linear layer: q s, or (q - z) s."""
    wanted = {
        "compressed-tensors": ("weight_packed", "weight_scale"),
        "awq": ("qweight", "qzeros", "scales"),
        "fp8": ("weight", "weight_scale_inv"),
    }.get(method, ())
    missing = [part for part in wanted if part not in parts]
    if missing or not wanted:
        raise ValueError(f"{name}: {method} has the parts {sorted(parts)}, wanted {list(wanted) or 'a plain weight'}")
    first, scale = parts[wanted[0]], parts[wanted[-1]].float()
    if method == "fp8":
        grown = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        return first.float() * grown[: first.shape[0], : first.shape[1]]
    if method == "awq":
        q, zeros = _awq(first), _awq(parts["qzeros"])
        group = q.shape[0] // zeros.shape[0]
        return ((q - zeros.repeat_interleave(group, 0)) * scale.repeat_interleave(group, 0)).T
    q = _nibbles(first).flatten(1) - 8.0
    if "weight_shape" in parts:
        q = q[:, : int(parts["weight_shape"][1])]
    return q * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [...] -> its nibbles [..., 8]: nibble i is bits 4i..4i+3; the sign bit is data."""
    return (words.unsqueeze(-1) >> torch.arange(0, 32, 4, device=words.device)) & 15


def _awq(words: Tensor) -> Tensor:
    """AutoAWQ's words [rows, c] -> [rows, 8 c]."""
    order = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return _nibbles(words)[..., order].flatten(1).float()
