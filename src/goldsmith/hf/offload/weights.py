"""A layer's experts as the store takes them: views of a module's memory, or of a checkpoint's mapped files.

Canonical: gate_up [E, 2I, H] with all gates before all ups, or the two apart, down [E, H, I], gate_up_bias [E, 2I],
down_bias [E, H]. What a model holds transposed or interleaved (gpt-oss) is a view of what it holds. Nothing is read
before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ...offload.store import ExpertStore
from ..checkpoint.experts import STACKED, by_expert, check_all_read
from ..checkpoint.reader import ModelCheckpoint
from ..experts_spec import ExpertsSpec
from .layers import ExpertsLayer


class PerExpertTensor:
    """A tensor [E, ...] that is read an expert at a time: `[e]`, `len`, `iter`, `shape`, `dtype`."""

    def __init__(self, read: Callable[[int], Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        self._read, self.shape, self.dtype = read, tuple(shape), dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        if not 0 <= expert < self.shape[0]:
            raise IndexError(expert)  # which ends an iteration over a sequence
        return self._read(expert)

    def __iter__(self) -> Iterator[Tensor]:
        return (self._read(expert) for expert in range(self.shape[0]))


Part = Tensor | PerExpertTensor
Weights = dict[str, Part | tuple[Part, Part]]  # by name, as above; gate_up may be two


def from_module(layer: ExpertsLayer) -> Weights:
    """The experts of a module that is in memory, as views."""
    spec = layer.spec
    given = {"gate_up": layer.module.gate_up_proj.detach(), "down": layer.module.down_proj.detach()}
    if spec.biased:
        given |= {
            "gate_up_bias": layer.module.gate_up_proj_bias.detach(),
            "down_bias": layer.module.down_proj_bias.detach(),
        }
    return {name: _canonical(name, tensor, spec, tensor.dtype) for name, tensor in given.items()}


def from_checkpoint(source: ModelCheckpoint, layer: ExpertsLayer, dtype: torch.dtype) -> Weights:
    """The experts of a checkpoint as the model would hold them in `dtype`, read from their files one by one.

    Fused in one tensor, or one tensor for each projection of each expert, under any name that transformers renames.
    Raises ValueError for a missing or a strange tensor, and for shapes that are not the config's.
    """
    spec, names = layer.spec, source.below(layer.path)
    if names & {"gate_up_proj", "down_proj"}:
        check_all_read(source, layer.path, names, set(STACKED))
        return _fused(source, layer, dtype)
    found = by_expert(source, layer.path, spec, names)
    keys = {name: found[name]["weight"] for name in ("gate", "up", "down")}
    shapes = {"gate": (spec.intermediate_size, spec.hidden_size), "down": (spec.hidden_size, spec.intermediate_size)}
    shapes["up"] = shapes["gate"]

    def one(name: str, e: int) -> Tensor:
        tensor = source.get(keys[name][e])
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{source.folder}: {keys[name][e]} is {list(tensor.shape)}, but the config says {list(shapes[name])}"
            )
        return as_held(tensor, dtype)

    def all_of(name: str) -> PerExpertTensor:
        return PerExpertTensor(lambda e: one(name, e), (spec.num_experts, *shapes[name]), one(name, 0).dtype)

    return {"gate_up": (all_of("gate"), all_of("up")), "down": all_of("down")}


def as_held(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As the model holds it; bfloat16 stays, where the model has the same values in float32, since it is narrower."""
    return tensor if (tensor.dtype, dtype) == (torch.bfloat16, torch.float32) else tensor.to(dtype)


def _fused(source: ModelCheckpoint, layer: ExpertsLayer, dtype: torch.dtype) -> Weights:
    spec = layer.spec
    names = ["gate_up", "down", *(("gate_up_bias", "down_bias") if spec.biased else ())]
    wanted = {
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "gate_up_bias": (2 * spec.intermediate_size,),
        "down_bias": (spec.hidden_size,),
    }
    found: Weights = {}
    for name in names:
        key = f"{layer.path}.{name.replace('gate_up', 'gate_up_proj').replace('down', 'down_proj')}"
        if key not in source.names:
            raise ValueError(f"{source.folder}: {key} is in none of its files")
        tensor = source.get(key)  # the file's own pages: nothing is read yet
        upright, shape = (spec.num_experts, *wanted[name]), tuple(tensor.shape)
        turned = (*upright[:1], *upright[:0:-1])
        if shape not in (upright, turned):
            raise ValueError(f"{source.folder}: {key} is {list(shape)}, but the config says {list(upright)}")
        # files may hold the transpose of what the model holds (qwen3_vl_moe); square ones are as in the model
        transposed = spec.transposed if upright == turned else shape == turned
        found[name] = _canonical(name, tensor, _turned(spec, transposed), dtype)
    return found


def _turned(spec: ExpertsSpec, transposed: bool) -> ExpertsSpec:
    return spec if spec.transposed == transposed else ExpertsSpec(**{**spec.__dict__, "transposed": transposed})


def _canonical(name: str, tensor: Tensor, spec: ExpertsSpec, dtype: torch.dtype) -> Part | tuple[Part, Part]:
    """A view, or gate and up as two; where the dtype is another, or files hold it, an expert at a time."""
    if name == "down":
        return _held(spec.columns(tensor), dtype)
    if name == "down_bias":
        return as_held(tensor, dtype).cpu()
    if name == "gate_up_bias":
        return as_held(spec.rows(tensor), dtype).cpu()
    upright = tensor.transpose(1, 2) if spec.transposed else tensor
    if spec.interleaved:
        return _held(upright[:, 0::2], dtype), _held(upright[:, 1::2], dtype)
    return _held(upright, dtype)


def _held(tensor: Tensor, dtype: torch.dtype) -> Tensor | PerExpertTensor:
    kept = as_held(tensor[:0], dtype).dtype
    if kept == tensor.dtype and tensor.device.type == "cpu":
        return tensor
    return PerExpertTensor(lambda e: tensor[e].to("cpu", kept), tensor.shape, kept)


def into_module(layer: ExpertsLayer, store: ExpertStore, device: torch.device, shared: dict[int, nn.Parameter]) -> None:
    """The module's parameters anew, from the store's numbers: the inverse of `from_module`

    shared: what was made of a parameter without numbers, by its id, for layers that share it.
    """
    spec, module = layer.spec, layer.module
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    if spec.biased:
        names |= {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
    empty = {name: module._parameters[own] for name, own in names.items()}
    made = {name: torch.empty_like(old, device=device) for name, old in empty.items() if id(old) not in shared}
    for e in range(spec.num_experts if made else 0):
        numbers = store.dequantize(layer.index, e)
        for name, tensor in made.items():
            target = tensor[e]
            if spec.transposed and target.dim() == 2:
                target = target.T
            if spec.interleaved and name.startswith("gate_up"):
                gate, up = numbers[name].chunk(2)
                target[0::2].copy_(gate)
                target[1::2].copy_(up)
            else:
                target.copy_(numbers[name])
    for name, tensor in made.items():
        shared[id(empty[name])] = nn.Parameter(tensor, requires_grad=False)
    for name, own in names.items():
        module._parameters[own] = shared[id(empty[name])]
