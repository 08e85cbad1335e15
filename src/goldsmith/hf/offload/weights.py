"""A layer's experts as the store takes them: views of a module's memory, or of a checkpoint's mapped files.

Canonical: gate_up [E, 2I, H] with all gates before all ups, or the two apart, down [E, H, I], gate_up_bias [E, 2I],
down_bias [E, H]. What a model holds transposed or interleaved (gpt-oss) is a view of what it holds. Nothing is read
before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...offload.store import ExpertStore
from ..checkpoint.experts import STACKED, by_expert, check_all_read
from ..checkpoint.reader import Checkpoint
from ..experts_spec import Form
from .layers import Layer

Weights = dict[str, Any]


class OneByOne:
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


def from_module(layer: Layer) -> Weights:
    """The experts of a module that is in memory, as views."""
    form = layer.form
    given = {"gate_up": layer.module.gate_up_proj.detach(), "down": layer.module.down_proj.detach()}
    if form.biased:
        given |= {
            "gate_up_bias": layer.module.gate_up_proj_bias.detach(),
            "down_bias": layer.module.down_proj_bias.detach(),
        }
    return {name: _canonical(name, tensor, form, tensor.dtype) for name, tensor in given.items()}


def from_checkpoint(source: Checkpoint, layer: Layer, dtype: torch.dtype) -> Weights:
    """The experts of a checkpoint as the model would hold them in `dtype`, read from their files one by one.

    Fused in one tensor, or one tensor for each projection of each expert, under any name that transformers renames.
    Raises ValueError for a missing or a strange tensor, and for shapes that are not the config's.
    """
    form, names = layer.form, source.below(layer.path)
    if names & {"gate_up_proj", "down_proj"}:
        check_all_read(source, layer.path, names, set(STACKED))
        return _fused(source, layer, dtype)
    found = by_expert(source, layer.path, form, names)
    keys = {name: found[name]["weight"] for name in ("gate", "up", "down")}
    shapes = {"gate": (form.intermediate_size, form.hidden_size), "down": (form.hidden_size, form.intermediate_size)}
    shapes["up"] = shapes["gate"]

    def one(name: str, e: int) -> Tensor:
        tensor = source.get(keys[name][e])
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{source.folder}: {keys[name][e]} is {list(tensor.shape)}, but the config says {list(shapes[name])}"
            )
        return held(tensor, dtype)

    def all_of(name: str) -> OneByOne:
        return OneByOne(lambda e: one(name, e), (form.num_experts, *shapes[name]), one(name, 0).dtype)

    return {"gate_up": (all_of("gate"), all_of("up")), "down": all_of("down")}


def held(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As the model holds it; bfloat16 stays, where the model has the same values in float32, since it is narrower."""
    return tensor if (tensor.dtype, dtype) == (torch.bfloat16, torch.float32) else tensor.to(dtype)


def _fused(source: Checkpoint, layer: Layer, dtype: torch.dtype) -> Weights:
    form = layer.form
    names = ["gate_up", "down", *(("gate_up_bias", "down_bias") if form.biased else ())]
    wanted = {
        "gate_up": (2 * form.intermediate_size, form.hidden_size),
        "down": (form.hidden_size, form.intermediate_size),
        "gate_up_bias": (2 * form.intermediate_size,),
        "down_bias": (form.hidden_size,),
    }
    found: Weights = {}
    for name in names:
        key = f"{layer.path}.{name.replace('gate_up', 'gate_up_proj').replace('down', 'down_proj')}"
        if key not in source.names:
            raise ValueError(f"{source.folder}: {key} is in none of its files")
        tensor = source.get(key)  # the file's own pages: nothing is read yet
        upright, shape = (form.num_experts, *wanted[name]), tuple(tensor.shape)
        turned = (*upright[:1], *upright[:0:-1])
        if shape not in (upright, turned):
            raise ValueError(f"{source.folder}: {key} is {list(shape)}, but the config says {list(upright)}")
        # files may hold the transpose of what the model holds (qwen3_vl_moe); square ones are as in the model
        transposed = form.transposed if upright == turned else shape == turned
        found[name] = _canonical(name, tensor, _turned(form, transposed), dtype)
    return found


def _turned(form: Form, transposed: bool) -> Form:
    return form if form.transposed == transposed else Form(**{**form.__dict__, "transposed": transposed})


def _canonical(name: str, tensor: Tensor, form: Form, dtype: torch.dtype) -> Any:
    """A view, or gate and up as two; where the dtype is another, or files hold it, an expert at a time."""
    if name == "down":
        return _held(form.columns(tensor), dtype)
    if name == "down_bias":
        return held(tensor, dtype).cpu()
    if name == "gate_up_bias":
        return held(form.rows(tensor), dtype).cpu()
    upright = tensor.transpose(1, 2) if form.transposed else tensor
    if form.interleaved:
        return _held(upright[:, 0::2], dtype), _held(upright[:, 1::2], dtype)
    return _held(upright, dtype)


def _held(tensor: Tensor, dtype: torch.dtype) -> Tensor | OneByOne:
    kept = held(tensor[:0], dtype).dtype
    if kept == tensor.dtype and tensor.device.type == "cpu":
        return tensor
    return OneByOne(lambda e: tensor[e].to("cpu", kept), tensor.shape, kept)


def into_module(layer: Layer, store: ExpertStore, device: torch.device, shared: dict[int, nn.Parameter]) -> None:
    """The module's parameters anew, from the store's numbers: the inverse of `from_module`

    shared: what was made of a parameter without numbers, by its id, for layers that share it.
    """
    form, module = layer.form, layer.module
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    if form.biased:
        names |= {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
    empty = {name: module._parameters[own] for name, own in names.items()}
    made = {name: torch.empty_like(old, device=device) for name, old in empty.items() if id(old) not in shared}
    for e in range(form.num_experts if made else 0):
        numbers = store.dequantize(layer.index, e)
        for name, tensor in made.items():
            target = tensor[e]
            if form.transposed and target.dim() == 2:
                target = target.T
            if form.interleaved and name.startswith("gate_up"):
                gate, up = numbers[name].chunk(2)
                target[0::2].copy_(gate)
                target[1::2].copy_(up)
            else:
                target.copy_(numbers[name])
    for name, tensor in made.items():
        shared[id(empty[name])] = nn.Parameter(tensor, requires_grad=False)
    for name, own in names.items():
        module._parameters[own] = shared[id(empty[name])]
