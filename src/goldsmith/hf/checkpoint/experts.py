"""Reads a layer's experts from a checkpoint: which tensors are gate, up and down, and how they are packed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ...experts import PackedExperts, from_mxfp4, pack
from ..experts_spec import ExpertsSpec
from .conversions import ConversionGroup
from .formats.layer import packed_layer
from .per_expert import Part, PerExpertTensor
from .source import WeightSource

MXFP4 = ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")


class Packing(TypedDict):
    """The keywords of `experts.pack` that the caller of `convert` chooses."""

    format: str
    group_size: int | None
    partitions: int


def packed_from(
    source: WeightSource, path: str, spec: ExpertsSpec, format: str, group_size: int | None, partitions: int
) -> PackedExperts:
    """The experts at `path`: the checkpoint's own codes, or its floats packed one expert at a time."""
    names = source.below(path)
    stored = "bf16" if format == "auto" else format
    packing: Packing = {"format": stored, "group_size": group_size, "partitions": partitions}
    if source.method == "mxfp4" and set(MXFP4) <= names:
        return _mxfp4(source, path, spec, names, group_size, partitions)
    coded = source.experts(path, spec)
    if coded is None:
        parts_by_name = {name: _no_double(part) for name, part in plain_parts(source, path, spec).items()}
        return pack_parts(parts_by_name, spec, packing)
    if not spec.gated:
        raise ValueError(f"{source.label}: {path} has codes of experts without a gate, which goldsmith does not read")
    return packed_layer(coded, format, group_size, partitions)


def pack_parts(parts: Mapping[str, Part], spec: ExpertsSpec, packing: Packing) -> PackedExperts:
    """`experts.pack` of plain weights in the module's own layout, by its names."""
    first, down = parts[spec.first], parts["down_proj"]
    biases: list[Any] = [_whole(parts[name]) for name in spec.names[2:]] or [None, None]
    gate_up: Any = first
    if not spec.gated:
        e, i, h = first.shape
        gate_up = (first, PerExpertTensor(lambda k: torch.zeros(i, h, dtype=first.dtype), (e, i, h), first.dtype))
        bias = torch.zeros(e, i, dtype=first.dtype) if biases[0] is None else biases[0]
        biases = [torch.cat((bias, torch.ones_like(bias)), 1), biases[1]]
        biases[1] = torch.zeros(e, spec.hidden_size, dtype=first.dtype) if biases[1] is None else biases[1]
    return pack(
        gate_up,
        down,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        transposed=spec.transposed,
        interleaved=spec.interleaved,
        **packing,
    )


def _no_double(part: Part) -> Part:
    """float64 as float32, in which a model is trained; experts are not packed in float64."""
    if part.dtype != torch.float64:
        return part
    return PerExpertTensor(lambda e: part[e].float(), tuple(part.shape), torch.float32)


def _whole(part: Part) -> Tensor:
    return part if isinstance(part, Tensor) else torch.stack(list(part))


def plain_parts(source: WeightSource, path: str, spec: ExpertsSpec) -> dict[str, Part]:
    """The experts' plain weights in the model's layout, by the model's names; read one by one where possible.

    Raises ValueError for a missing or unknown tensor, a missing expert, and shapes other than the config's.
    """
    names = source.below(path)
    wanted = spec.parameter_shapes()
    check_all_known(source, path, names, set(wanted))
    parts: dict[str, Part] = {}
    for name, shape in wanted.items():
        full = source.stored_name(f"{path}.{name}")
        if full not in source.names:
            raise ValueError(f"{source.label}: none of its files has {full}")
        made_by = source.names[full]
        if isinstance(made_by, ConversionGroup):
            _check_experts(source, full, made_by, spec)
        part: Part | None = source.per_expert(full, spec.num_experts)
        part = source.get(full) if part is None else part
        if tuple(part.shape) != shape:
            raise ValueError(f"{source.label}: {full} is {list(part.shape)}, but the config says {list(shape)}")
        parts[name] = part
    return parts


def _check_experts(source: WeightSource, full: str, group: ConversionGroup, spec: ExpertsSpec) -> None:
    """Raises ValueError if a converter that stacks experts would stack others than 0..E-1, or lacks a projection."""
    if type(group.converter.operations[0]).__name__ != "MergeModulelist":
        return
    for pattern in group.converter.source_patterns:
        numbers = [_last_number(key) for key in group.keys.get(pattern, ())]
        missing = sorted(set(range(spec.num_experts)) - set(numbers))
        projection = re.sub(r"^.*\*\\?\.|\.?weight\$?$", "", pattern).replace("\\", "") or pattern
        if missing:
            raise ValueError(
                f"{source.label}: {full.rpartition('.')[0]}: expert {missing[0]} has no {projection} weight (plain "
                f"weights; the config says {spec.num_experts} experts)"
            )
        if numbers != list(range(spec.num_experts)):
            extra = sorted(set(numbers) - set(range(spec.num_experts))) or [n for n in numbers if numbers.count(n) > 1]
            raise ValueError(
                f"{source.label}: {full.rpartition('.')[0]} has the expert {extra[0]} more than once or beyond the "
                f"{spec.num_experts} of the config"
            )


def _last_number(key: str) -> int:
    return int(next((part for part in reversed(key.split(".")) if part.isdecimal()), "-1"))


def _mxfp4(
    source: WeightSource, path: str, spec: ExpertsSpec, names: set[str], group_size: int | None, partitions: int
) -> PackedExperts:
    check_all_known(source, path, names, {*MXFP4, "gate_up_proj_bias", "down_proj_bias"})
    if group_size not in (None, 32):
        raise ValueError(f"goldsmith.hf.convert: group_size is {group_size}, but mxfp4 fixes it at 32; leave it out")
    return from_mxfp4(
        *(source.get(f"{path}.{name}") for name in MXFP4),
        gate_up_bias=source.get(f"{path}.gate_up_proj_bias") if spec.biased else None,
        down_bias=source.get(f"{path}.down_proj_bias") if spec.biased else None,
        interleaved=spec.interleaved,
        partitions=partitions,
    )


def check_all_known(source: WeightSource, path: str, names: set[str], known: set[str]) -> None:
    unknown = sorted(names - known)
    if unknown:
        raise ValueError(
            f"{source.label}: {path}.{unknown[0]} is not known among experts of {source.method or 'plain weights'}"
        )
