"""compressed-tensors, as llm-compressor writes it: integers and floats of 4 and 8 bits, by groups of layers.

pack-quantized: int32 words of q + 2^(bits - 1) along the inputs, weight_zero_point packed along the outputs.
int-quantized, float-quantized, naive-quantized: one code in an element. nvfp4- and mxfp4-pack-quantized: E2M1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....experts.packed.formats import Codes
from . import fp4, fp8
from .scheme import Parts, Scheme, check_dtype, check_shape, groups_of
from .words import fields, signed, unsigned

NAIVE = ("int-quantized", "float-quantized", "naive-quantized")
KNOWN = ("pack-quantized", *NAIVE, "nvfp4-pack-quantized", "mxfp4-pack-quantized")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def schemes_of(settings: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    """(targets, scheme) of each group of layers; raises ValueError for a kind that is not supported."""
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"compressed-tensors with the sparsity format {sparsity['format']!r}; supported is dense")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise ValueError("compressed-tensors with transform_config: its weights are rotated, which is not supported")
    groups = settings.get("config_groups") or {}
    if not groups:
        raise ValueError("compressed-tensors without config_groups, which say how the weights are stored")
    rules = []
    for group in groups.values():
        layout, weights = group.get("format") or settings.get("format"), group.get("weights")
        if weights is None:  # only activations are quantised
            continue
        if layout not in KNOWN:
            raise ValueError(f"compressed-tensors format {layout!r}; supported are {', '.join(KNOWN)}")
        rules.append((list(group.get("targets") or ["Linear"]), _scheme(layout, weights)))
    return rules


def _scheme(layout: str, weights: Mapping[str, Any]) -> Scheme:
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    symmetric = weights.get("symmetric") is not False
    size, block = weights.get("group_size"), weights.get("block_structure")
    size = None if size in (None, -1) else size
    strategy = weights.get("strategy") or ("group" if size else "block" if block else "tensor")
    label = f"compressed-tensors {layout} ({bits} bits, {strategy}{'' if symmetric else ', asymmetric'})"
    refused = ValueError(f"{label}, type {kind!r} is not supported")
    if kind == "float" and bits == 4 and symmetric:
        if layout == "nvfp4-pack-quantized":
            return fp4.nvfp4(label, "weight_packed", "weight_global_scale", divided=True)
        if layout == "mxfp4-pack-quantized":
            return fp4.mxfp4(label)
    if kind == "float" and bits == 8 and symmetric and layout in NAIVE:
        if strategy == "tensor":
            return fp8.tensorwise(label, "weight_scale")
        if strategy == "block":
            return fp8.blockwise(label, list(block or []), "weight_scale")
        if strategy in ("channel", "group"):
            return fp8.rowwise(label, "weight_scale", size if strategy == "group" else None)
    if kind != "int" or strategy not in ("tensor", "channel", "group") or layout not in ("pack-quantized", *NAIVE):
        raise refused
    packed = layout == "pack-quantized"
    if packed and bits not in (2, 4, 8) or not 2 <= bits <= 8:
        raise refused
    return _integers(label, weights, packed, bits, symmetric, size if strategy == "group" else None)


def _integers(
    label: str, weights: Mapping[str, object], packed: bool, bits: int, symmetric: bool, group: int | None
) -> Scheme:
    # "weight" and "static" order leave the groups next to each other; "group" and "dynamic" do not
    ordered = str(weights.get("actorder") or "").rpartition(".")[2].lower() in ("group", "dynamic", "true")
    parts: tuple[str, ...] = ("weight_packed" if packed else "weight", "weight_scale")
    optional: tuple[str, ...] = ("weight_shape",) + (("weight_zero_point",) if symmetric else ())
    if not symmetric:
        parts += ("weight_zero_point",)
    if ordered:
        parts += ("weight_g_idx",)
    else:
        optional += ("weight_g_idx",)
    wide = not packed or bits == 8
    reason, form = "", "int8" if wide else "int4" if symmetric else "int4_asym"
    if ordered:
        reason = "the inputs of a group are not next to each other (actorder)"
    elif wide and not symmetric:
        reason = "int8 has no zero points"
    read = partial(_read, packed=packed, bits=bits, symmetric=symmetric, group=group, ordered=ordered)
    return Scheme(label, parts, read, None if reason else form, group, reason, optional)


def _read(
    parts: Parts, *, packed: bool, bits: int, symmetric: bool, group: int | None, ordered: bool
) -> Codes | Tensor:
    name = "weight_packed" if packed else "weight"
    codes, scale = parts[name], parts["weight_scale"]
    check_dtype(name, codes, torch.int32 if packed else torch.int8)
    check_dtype("weight_scale", scale, *FLOATS)
    actual, rows = f"{name} {list(codes.shape)}", codes.shape[0]
    q = fields(codes, bits) if packed else codes.view(torch.uint8) ^ 128
    lift = 1 << (bits - 1) if packed else 128
    inputs = q.shape[1]
    if "weight_shape" in parts:
        shape = [int(size) for size in parts["weight_shape"].flatten()]
        words = -(-shape[-1] * bits // 32) if packed else codes.shape[-1]
        if len(shape) != 2 or shape[0] != rows or words != codes.shape[-1] or shape[1] > inputs:
            raise ValueError(f"weight_shape says {shape}, but {actual} has other sizes")
        inputs = shape[1]
        q = q[:, :inputs]
    index = parts.get("weight_g_idx")
    groups = groups_of(inputs, group, actual)
    if scale.numel() == 1 and group is None:
        scale = scale.reshape(1, 1).expand(rows, 1)  # one for the whole matrix
    check_shape("weight_scale", scale, (rows, groups), actual)
    zeros = _zeros(parts, packed, bits, symmetric, rows, groups)
    if ordered and index is not None:
        check_shape("weight_g_idx", index, (inputs,), actual)
        if index.numel() and not (0 <= int(index.min()) and int(index.max()) < groups):
            raise ValueError(f"weight_g_idx holds {int(index.max())}, but there are {groups} groups")
        places = index.long()
        offset = lift if zeros is None else zeros.float()[:, places]
        return (q.float() - offset) * scale.float()[:, places]
    if index is not None and not torch.equal(index.long(), torch.arange(inputs) // (group or inputs)):
        raise ValueError("weight_g_idx does not number the groups in order, but the config has no actorder")
    scale = scale.contiguous()
    pairs = inputs % 2 == 0  # four-bit codes are two in a byte
    if zeros is None and (pairs or bits == 8 or not packed):
        return Codes(signed(q, bits if packed else 8), scale)
    if zeros is not None and packed and bits <= 4 and pairs:
        return Codes(unsigned(q), scale, zeros)
    offset = lift if zeros is None else zeros.float().unsqueeze(-1)
    numbers = q.reshape(rows, groups, -1).float() - offset
    return (numbers * scale.float().unsqueeze(-1)).view(rows, -1)


def _zeros(parts: Parts, packed: bool, bits: int, symmetric: bool, rows: int, groups: int) -> Tensor | None:
    """The zero points as unsigned numbers [rows, groups]; None for a symmetric layer."""
    stored = parts.get("weight_zero_point")
    if stored is None:
        return None
    if symmetric:
        if bool((stored != 0).any()):
            raise ValueError("weight_zero_point is not 0, but the config says symmetric")
        return None
    if packed:
        check_dtype("weight_zero_point", stored, torch.int32)
        check_shape("weight_zero_point", stored, (-(-rows * bits // 32), groups), f"{rows} rows")
        return fields(stored.t(), bits)[:, :rows].t().contiguous()
    check_dtype("weight_zero_point", stored, torch.int8)
    if stored.numel() == 1:
        stored = stored.reshape(1, 1).expand(rows, groups)
    check_shape("weight_zero_point", stored, (rows, groups), f"{rows} rows")
    return stored.contiguous().view(torch.uint8) ^ 128
