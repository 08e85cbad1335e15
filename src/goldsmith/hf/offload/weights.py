"""A layer's experts in the layout of the store: views of a module's memory, or of a checkpoint's mapped files.

The layout: gate_up [E, 2I, H] with all gates before all ups, or the two separately; down [E, H, I]; gate_up_bias
[E, 2I]; down_bias [E, H]. Transposed and interleaved weights (gpt-oss) become views of the model's own. Nothing is read
before it is accessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ...offload.store.expert_store import ExpertStore
from ..checkpoint.experts import STACKED, check_all_known, names_by_expert
from ..checkpoint.formats.layer import CodedLayer
from ..checkpoint.source import WeightSource
from ..experts_spec import ExpertsSpec
from .layers import ExpertsLayer


class PerExpertTensor:
    """A tensor [E, ...] that is read one expert at a time: `[e]`, `len`, `iter`, `shape`, `dtype`."""

    def __init__(self, read: Callable[[int], Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        self._read, self.shape, self.dtype = read, tuple(shape), dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        if not 0 <= expert < self.shape[0]:
            raise IndexError(expert)  # ends an iteration over a sequence
        return self._read(expert)

    def __iter__(self) -> Iterator[Tensor]:
        return (self._read(expert) for expert in range(self.shape[0]))


Part = Tensor | PerExpertTensor
Weights = dict[str, Part | tuple[Part, Part]]  # by name, in the layout above; gate_up may be a pair


def from_module(layer: ExpertsLayer) -> Weights:
    """The experts of a module in memory, as views."""
    spec = layer.spec
    tensors = {"gate_up": layer.module.gate_up_proj.detach(), "down": layer.module.down_proj.detach()}
    if spec.biased:
        tensors |= {
            "gate_up_bias": layer.module.gate_up_proj_bias.detach(),
            "down_bias": layer.module.down_proj_bias.detach(),
        }
    return {name: _canonical(name, tensor, spec, tensor.dtype) for name, tensor in tensors.items()}


def from_checkpoint(source: WeightSource, layer: ExpertsLayer, dtype: torch.dtype) -> Weights:
    """The experts of a checkpoint as the model would hold them in `dtype`, read from the files one by one.

    Either one tensor for all experts, or one for each projection of each expert, under any name that transformers
    renames. Raises ValueError for a missing or unknown tensor, and for shapes that differ from the config's.
    """
    spec, names = layer.spec, source.below(layer.path)
    if names & {"gate_up_proj", "down_proj"}:
        check_all_known(source, layer.path, names, set(STACKED))
        return _fused(source, layer, dtype)
    tensor_names = names_by_expert(source, layer.path, spec, names)
    names_of = {name: tensor_names[name] for name in ("gate", "up", "down")}
    shapes = {"gate": (spec.intermediate_size, spec.hidden_size), "down": (spec.hidden_size, spec.intermediate_size)}
    shapes["up"] = shapes["gate"]

    def one(name: str, e: int) -> Tensor:
        tensor = source.get(names_of[name][e])
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{source.folder}: {names_of[name][e]} is {list(tensor.shape)}, but the config says "
                f"{list(shapes[name])}"
            )
        return cast(tensor, dtype)

    def all_of(name: str) -> PerExpertTensor:
        return PerExpertTensor(lambda e: one(name, e), (spec.num_experts, *shapes[name]), one(name, 0).dtype)

    return {"gate_up": (all_of("gate"), all_of("up")), "down": all_of("down")}


def decoded_experts(layer: CodedLayer, dtype: torch.dtype) -> Weights:
    """The experts of a layer whose codes no format holds: their weights in float32, decoded one by one.

    Plain floats of a GGUF file are in the dtype that the model would hold them in.
    """
    sizes = (layer.spec.intermediate_size, layer.spec.hidden_size)
    held = torch.float32 if layer.floats is None else cast(torch.empty(0, dtype=layer.floats), dtype).dtype

    def all_of(name: str, shape: tuple[int, ...]) -> PerExpertTensor:
        return PerExpertTensor(lambda e: layer.weights(name, e).to(held), (layer.spec.num_experts, *shape), held)

    weights: Weights = {"gate_up": (all_of("gate", sizes), all_of("up", sizes)), "down": all_of("down", sizes[::-1])}
    biases = zip(("gate_up_bias", "down_bias"), layer.biases())
    return weights | {name: bias for name, bias in biases if bias is not None}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the model's dtype; but bfloat16 stays if the model has float32, which holds the same values."""
    return tensor if (tensor.dtype, dtype) == (torch.bfloat16, torch.float32) else tensor.to(dtype)


def _fused(source: WeightSource, layer: ExpertsLayer, dtype: torch.dtype) -> Weights:
    spec = layer.spec
    names = ["gate_up", "down", *(("gate_up_bias", "down_bias") if spec.biased else ())]
    shapes = {
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "gate_up_bias": (2 * spec.intermediate_size,),
        "down_bias": (spec.hidden_size,),
    }
    weights: Weights = {}
    for name in names:
        key = f"{layer.path}.{name.replace('gate_up', 'gate_up_proj').replace('down', 'down_proj')}"
        if key not in source.names:
            raise ValueError(f"{source.folder}: none of its files has {key}")
        tensor = source.get(key)  # the file's mapped pages: nothing is read yet
        upright, shape = (spec.num_experts, *shapes[name]), tuple(tensor.shape)
        turned = (*upright[:1], *upright[:0:-1])
        if shape not in (upright, turned):
            raise ValueError(f"{source.folder}: {key} is {list(shape)}, but the config says {list(upright)}")
        # files may store the transpose of the model's layout (qwen3_vl_moe); square weights have the model's layout
        transposed = spec.transposed if upright == turned else shape == turned
        weights[name] = _canonical(name, tensor, _with_transposed(spec, transposed), dtype)
    return weights


def _with_transposed(spec: ExpertsSpec, transposed: bool) -> ExpertsSpec:
    return spec if spec.transposed == transposed else ExpertsSpec(**{**spec.__dict__, "transposed": transposed})


def _canonical(name: str, tensor: Tensor, spec: ExpertsSpec, dtype: torch.dtype) -> Part | tuple[Part, Part]:
    """The tensor in the store's layout: a view, a pair of views, or read per expert if its dtype or device changes."""
    if name == "down":
        return _lazily_cast(spec.canonical_down(tensor), dtype)
    if name == "down_bias":
        return cast(tensor, dtype).cpu()
    if name == "gate_up_bias":
        return cast(spec.canonical_gate_up(tensor), dtype).cpu()
    upright = tensor.transpose(1, 2) if spec.transposed else tensor
    if spec.interleaved:
        return _lazily_cast(upright[:, 0::2], dtype), _lazily_cast(upright[:, 1::2], dtype)
    return _lazily_cast(upright, dtype)


def _lazily_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor | PerExpertTensor:
    stored_dtype = cast(tensor[:0], dtype).dtype
    if stored_dtype == tensor.dtype and tensor.device.type == "cpu":
        return tensor
    return PerExpertTensor(lambda e: tensor[e].to("cpu", stored_dtype), tensor.shape, stored_dtype)


def into_module(layer: ExpertsLayer, store: ExpertStore, device: torch.device, shared: dict[int, nn.Parameter]) -> None:
    """Restores the module's parameters from the store: the inverse of `from_module`.

    shared   the restored parameters by the id of their empty replacement, for layers that share them
    """
    spec, module = layer.spec, layer.module
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    if spec.biased:
        names |= {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
    empty = {name: module._parameters[own] for name, own in names.items()}
    fresh = {name: torch.empty_like(old, device=device) for name, old in empty.items() if id(old) not in shared}
    for e in range(spec.num_experts if fresh else 0):
        numbers = store.dequantize(layer.index, e)
        for name, tensor in fresh.items():
            target = tensor[e]
            if spec.transposed and target.dim() == 2:
                target = target.T
            if spec.interleaved and name.startswith("gate_up"):
                gate, up = numbers[name].chunk(2)
                target[0::2].copy_(gate)
                target[1::2].copy_(up)
            else:
                target.copy_(numbers[name])
    for name, tensor in fresh.items():
        shared[id(empty[name])] = nn.Parameter(tensor, requires_grad=False)
    for name, own in names.items():
        module._parameters[own] = shared[id(empty[name])]
