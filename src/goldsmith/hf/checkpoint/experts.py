"""Reads a layer's experts from a checkpoint: which tensors are gate, up and down, and how they are packed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypedDict

from torch import Tensor

from ...experts import PackedExperts, from_mxfp4, pack
from ..experts_spec import ExpertsSpec
from .formats.layer import PROJECTIONS, packed_layer
from .source import WeightSource

STACKED = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
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
    if {"gate_up_proj", "down_proj"} <= names:
        check_all_known(source, path, names, set(STACKED))
        return _stacked(source, path, spec, names, packing)
    coded = source.experts(path, spec)
    if coded is not None:
        return packed_layer(coded, format, group_size, partitions)
    tensor_names = names_by_expert(source, path, spec, names)
    gate, up, down = (_PerExpert(source, tensor_names[name]) for name in ("gate", "up", "down"))
    return pack((gate, up), down, **packing)


class _PerExpert:
    """One projection's tensors of all experts, each read when it is requested, so that packing holds one at a time."""

    def __init__(self, source: WeightSource, names: list[str]) -> None:
        self._source, self._names = source, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Tensor]:
        return (self._source.get(name) for name in self._names)


def names_by_expert(source: WeightSource, path: str, spec: ExpertsSpec, names: set[str]) -> dict[str, list[str]]:
    """{"gate": names of the tensors of experts 0..E-1, ...}; ValueError for a missing or unknown name."""
    tensor_names: dict[str, list[str]] = {t: [""] * spec.num_experts for t in PROJECTIONS.values()}
    unknown = []
    for name in sorted(names):
        match = re.fullmatch(r"(\d+)\.(\w+)\.weight", name)
        target = PROJECTIONS.get(match[2]) if match else None
        if match is None or target is None or int(match[1]) >= spec.num_experts:
            unknown.append(name)
        else:
            tensor_names[target][int(match[1])] = f"{path}.{name}"
    kind = source.method or "plain weights"
    if unknown:
        raise ValueError(f"{source.label}: {path}.{unknown[0]} is not known among experts of {kind}")
    for target, listed in tensor_names.items():
        if "" in listed:
            raise ValueError(
                f"{source.label}: {path}: expert {listed.index('')} has no {target} weight ({kind}; "
                f"the config says {spec.num_experts} experts)"
            )
    return tensor_names


def _stacked(source: WeightSource, path: str, spec: ExpertsSpec, names: set[str], packing: Packing) -> PackedExperts:
    gate_up, down = (source.get(f"{path}.{name}") for name in ("gate_up_proj", "down_proj"))
    upright = (spec.num_experts, 2 * spec.intermediate_size, spec.hidden_size)
    shape, swapped = tuple(gate_up.shape), (upright[0], upright[2], upright[1])
    if shape not in (upright, swapped):
        raise ValueError(f"{source.label}: {path}.gate_up_proj is {list(shape)}, but the config says {list(upright)}")
    # files may store the transpose of the model's layout (qwen3_vl_moe); square weights have the model's layout
    transposed = spec.transposed if upright == swapped else shape == swapped
    gate_up_bias, down_bias = (
        source.get(f"{path}.{which}_proj_bias") if spec.biased else None for which in ("gate_up", "down")
    )
    return pack(
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        transposed=transposed,
        interleaved=spec.interleaved,
        **packing,
    )


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
