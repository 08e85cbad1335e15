"""Experts out of a checkpoint: which names are gate, up and down, and which importer reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...experts import PackedExperts, from_awq, from_fp8_block, from_k2, from_mxfp4, pack
from ..experts_spec import Form
from .reader import Checkpoint

PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
# quant_method -> the tensors of one projection, in the importer's order; and what may stand beside them, unread
PARTS = {
    None: ("weight",),
    "fp8": ("weight", "weight_scale_inv"),
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "awq": ("qweight", "qzeros", "scales"),
}
UNREAD = {"weight_shape"}
STACKED = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
MXFP4 = ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")


def packed_from(
    source: Checkpoint, path: str, form: Form, format: str, group_size: int | None, partitions: int
) -> PackedExperts:
    """The experts at `path`, by the checkpoint's own codes, or packed from its floats one expert at a time."""
    names = source.below(path)
    stored = "bf16" if format == "auto" else format
    plain: dict[str, Any] = {"format": stored, "group_size": group_size, "partitions": partitions}
    if source.method == "mxfp4" and set(MXFP4) <= names:
        return _mxfp4(source, path, form, names, group_size, partitions)
    if {"gate_up_proj", "down_proj"} <= names:
        check_all_read(source, path, names, set(STACKED))
        return _stacked(source, path, form, names, plain)
    found = by_expert(source, path, form, names)
    if source.method is None:
        ours: Any = {name: _Experts(source, found[name]["weight"]) for name in ("gate", "up", "down")}
        return pack((ours["gate"], ours["up"]), ours["down"], **plain)
    parts = PARTS[source.method]
    gate, up, down = (tuple(_Experts(source, found[name][part]) for part in parts) for name in ("gate", "up", "down"))
    group = _group(source, gate)
    if group_size not in (None, group):
        raise ValueError(
            f"goldsmith.hf.convert: group_size is {group_size}, but the codes of {source.folder} have "
            f"{group or 'blocks of 128 x 128'}: leave it out"
        )
    if group is None:
        return from_fp8_block(gate, up, down, partitions=partitions)
    importer = from_awq if source.method == "awq" else from_k2
    return importer(gate, up, down, group_size=group, partitions=partitions)


class _Experts:
    """A tensor of every expert, read when it is asked for: packing holds one expert at a time."""

    def __init__(self, source: Checkpoint, names: list[str]) -> None:
        self._source, self._names = source, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Tensor]:
        return (self._source.get(name) for name in self._names)


def by_expert(source: Checkpoint, path: str, form: Form, names: set[str]) -> dict[str, dict[str, list[str]]]:
    """{"gate": {part: the names of experts 0..E-1}, ...}; every name below the path is read or refused."""
    parts = PARTS[source.method] if source.method in PARTS else ()
    found: dict[str, dict[str, list[str]]] = {
        t: {part: [""] * form.num_experts for part in parts} for t in PROJECTIONS.values()
    }
    strange = []
    for name in sorted(names):
        match = re.fullmatch(r"(\d+)\.(\w+)\.(\w+)", name)
        target = PROJECTIONS.get(match[2]) if match else None
        if match is None or target is None or int(match[1]) >= form.num_experts:
            strange.append(name)
        elif match[3] in parts:
            found[target][match[3]][int(match[1])] = f"{path}.{name}"
        elif match[3] not in UNREAD:
            strange.append(name)
    kind = source.method or "plain weights"
    if strange:
        raise ValueError(f"{source.folder}: {path}.{strange[0]} is not known among experts of {kind}")
    for target, by_part in found.items():
        for part, listed in by_part.items():
            if "" in listed:
                raise ValueError(
                    f"{source.folder}: {path}: expert {listed.index('')} has no {target} {part} ({kind}, "
                    f"{form.num_experts} experts by the config)"
                )
    return found


def _stacked(source: Checkpoint, path: str, form: Form, names: set[str], plain: dict[str, Any]) -> PackedExperts:
    gate_up, down = (source.get(f"{path}.{name}") for name in ("gate_up_proj", "down_proj"))
    upright = (form.num_experts, 2 * form.intermediate_size, form.hidden_size)
    shape, swapped = tuple(gate_up.shape), (upright[0], upright[2], upright[1])
    if shape not in (upright, swapped):
        raise ValueError(f"{source.folder}: {path}.gate_up_proj is {list(shape)}, but the config says {list(upright)}")
    # files may hold the transpose of what the model holds (qwen3_vl_moe); square ones are as in the model
    transposed = form.transposed if upright == swapped else shape == swapped
    biases: dict[str, Any] = {
        f"{which}_bias": source.get(f"{path}.{which}_proj_bias") if form.biased else None
        for which in ("gate_up", "down")
    }
    return pack(gate_up, down, **biases, transposed=transposed, interleaved=form.interleaved, **plain)


def _mxfp4(
    source: Checkpoint, path: str, form: Form, names: set[str], group_size: int | None, partitions: int
) -> PackedExperts:
    check_all_read(source, path, names, {*MXFP4, "gate_up_proj_bias", "down_proj_bias"})
    if group_size not in (None, 32):
        raise ValueError(f"goldsmith.hf.convert: group_size is {group_size}, but mxfp4 has groups of 32: leave it out")
    return from_mxfp4(
        *(source.get(f"{path}.{name}") for name in MXFP4),
        gate_up_bias=source.get(f"{path}.gate_up_proj_bias") if form.biased else None,
        down_bias=source.get(f"{path}.down_proj_bias") if form.biased else None,
        interleaved=form.interleaved,
        partitions=partitions,
    )


def check_all_read(source: Checkpoint, path: str, names: set[str], known: set[str]) -> None:
    strange = sorted(names - known)
    if strange:
        raise ValueError(
            f"{source.folder}: {path}.{strange[0]} is not known among experts of {source.method or 'plain weights'}"
        )


def _group(source: Checkpoint, parts: tuple[_Experts, ...]) -> int | None:
    """Inputs that share a scale in the first expert's codes; None for blocks."""
    if source.method == "fp8":
        return None
    codes, scale = (next(iter(part)).shape for part in (parts[0], parts[-1]))
    return codes[0] // scale[0] if source.method == "awq" else codes[1] * 8 // scale[1]
