"""A layer's experts in the layout of the store: views of a module's memory, or of a checkpoint's mapped files.

The layout: gate_up [E, 2I, H] with all gates before all ups, or the two separately; down [E, H, I]; gate_up_bias
[E, 2I]; down_bias [E, H]. Transposed and interleaved weights (gpt-oss) become views of the model's own. Nothing is read
before it is accessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast as cast_type

import torch
from torch import Tensor, nn

from ...experts.packed.assembly import layout_of
from ...experts.packed.formats import Codes
from ...experts.packed.layout import Expert
from ...experts.packed.packing import check_biases
from ...offload.store.expert_store import ExpertStore
from ...offload.store.samples import sampled_rows
from ...offload.store.source import BIASES, CodedExperts
from ..checkpoint.experts import plain_parts
from ..checkpoint.formats.layer import NAMES, CodedLayer, code_format, expert_of
from ..checkpoint.per_expert import Part, PerExpertTensor
from ..checkpoint.source import WeightSource
from ..experts_spec import ExpertsSpec
from .layers import ExpertsLayer

_OP = "offload"
Weights = dict[str, Part | tuple[Part, Part]]  # by name, in the layout above; gate_up may be a pair


def from_module(layer: ExpertsLayer) -> Weights:
    """The experts of a module in memory, as views."""
    parts: dict[str, Part] = {name: getattr(layer.module, name).detach() for name in layer.spec.names}
    return _canonical_weights(parts, layer.spec, None)


def from_checkpoint(source: WeightSource, layer: ExpertsLayer, dtype: torch.dtype) -> Weights:
    """The experts of a checkpoint as the model would hold them in `dtype`, read from the files one by one.

    The files may hold any layout that transformers converts. Raises ValueError for a missing or unknown tensor, and for
    shapes that differ from the config's.
    """
    return _canonical_weights(plain_parts(source, layer.path, layer.spec), layer.spec, dtype)


def _canonical_weights(parts: Mapping[str, Part], spec: ExpertsSpec, dtype: torch.dtype | None) -> Weights:
    """The module's own parameters in the store's layout; `dtype` None: as they are."""
    weights: Weights = {}
    for name, part in zip(("gate_up", "down", "gate_up_bias", "down_bias"), (parts[name] for name in spec.names)):
        weights[name] = _canonical(name, part, spec, part.dtype if dtype is None else dtype)
    if spec.gated:
        return weights
    gate = cast_type("Part", weights["gate_up"])
    e, i, h, stored = *gate.shape, gate.dtype
    weights["gate_up"] = gate, PerExpertTensor(lambda k: torch.zeros(i, h, dtype=stored), (e, i, h), stored)
    bias = cast_type("Tensor", weights.get("gate_up_bias", torch.zeros(e, i, dtype=stored)))
    weights["gate_up_bias"] = torch.cat((bias, torch.ones_like(bias)), 1)
    weights.setdefault("down_bias", torch.zeros(e, h, dtype=stored))
    return weights


def coded_experts(layer: CodedLayer) -> CodedExperts:
    """The experts of a layer in the checkpoint's own codes, read one by one. Raises ValueError for invalid codes."""
    if not layer.spec.gated:
        raise ValueError(f"{layer.where}: has codes of experts without a gate, which goldsmith does not read")
    target, count = code_format(layer), layer.spec.num_experts
    layout = layout_of(_OP, target.format, target.group, count, expert_of(layer, 0))
    kept = check_biases(_OP, *layer.biases(), count, layout.hidden_size, layout.intermediate_size, False)
    biases = {name: bias for name, bias in zip(BIASES, kept) if bias is not None}
    rows = {name: sampled_rows(layout.hidden_size if name == "down" else layout.intermediate_size) for name in NAMES}
    stored = layer.stored()

    def samples() -> list[Expert]:
        matrices = (cast_type("list[Codes]", layer.rows(name, rows[name])) for name in NAMES)
        return [Expert(*of_one) for of_one in zip(*matrices)]

    return CodedExperts(layout, partial(expert_of, layer), biases, None if stored is None else samples, stored)


def decoded_experts(layer: CodedLayer, dtype: torch.dtype) -> Weights:
    """The experts of a layer whose codes no format holds: their weights in float32, decoded one by one.

    Plain floats of a GGUF file are in the dtype that the model would hold them in.
    """
    sizes = (layer.spec.intermediate_size, layer.spec.hidden_size)
    stored = torch.float32 if layer.floats is None else cast(torch.empty(0, dtype=layer.floats), dtype).dtype

    def all_of(name: str, shape: tuple[int, ...]) -> PerExpertTensor:
        return PerExpertTensor(lambda e: layer.weights(name, e).to(stored), (layer.spec.num_experts, *shape), stored)

    weights: Weights = {"gate_up": (all_of("gate", sizes), all_of("up", sizes)), "down": all_of("down", sizes[::-1])}
    biases = zip(("gate_up_bias", "down_bias"), layer.biases())
    return weights | {name: bias for name, bias in biases if bias is not None}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the model's dtype; but bfloat16 stays if the model has float32, which holds the same values."""
    return tensor if (tensor.dtype, dtype) == (torch.bfloat16, torch.float32) else tensor.to(dtype)


def _canonical(name: str, part: Part, spec: ExpertsSpec, dtype: torch.dtype) -> Part | tuple[Part, Part]:
    """The tensor in the store's layout: a view, a pair of views, or read per expert if its dtype or device changes."""
    if name.endswith("bias"):
        tensor = part if isinstance(part, Tensor) else torch.stack(list(part))
        gated = name == "gate_up_bias" and spec.gated
        return cast(spec.canonical_gate_up(tensor) if gated else tensor, dtype).cpu()
    upright = _turned(part) if spec.transposed else part
    if name == "gate_up" and spec.interleaved:
        return _lazily_cast(_every_second(upright, 0), dtype), _lazily_cast(_every_second(upright, 1), dtype)
    return _lazily_cast(upright, dtype)


def _turned(part: Part) -> Part:
    if isinstance(part, Tensor):
        return part.transpose(1, 2)
    return PerExpertTensor(lambda e: part[e].T, (part.shape[0], *part.shape[:0:-1]), part.dtype)


def _every_second(part: Part, start: int) -> Part:
    if isinstance(part, Tensor):
        return part[:, start::2]
    return PerExpertTensor(
        lambda e: part[e][start::2], (part.shape[0], part.shape[1] // 2, *part.shape[2:]), part.dtype
    )


def _lazily_cast(part: Part, dtype: torch.dtype) -> Part:
    stored_dtype = cast(torch.empty(0, dtype=part.dtype), dtype).dtype
    if stored_dtype == part.dtype and (isinstance(part, PerExpertTensor) or part.device.type == "cpu"):
        return part
    return PerExpertTensor(lambda e: part[e].to("cpu", stored_dtype), part.shape, stored_dtype)


def into_module(layer: ExpertsLayer, store: ExpertStore, device: torch.device, shared: dict[int, nn.Parameter]) -> None:
    """Restores the module's parameters from the store: the inverse of `from_module`.

    shared   the restored parameters by the id of their empty replacement, for layers that share them
    """
    spec, module = layer.spec, layer.module
    names = dict(zip(("gate_up", "down", "gate_up_bias", "down_bias"), spec.names))
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
            elif name.startswith("gate_up") and not spec.gated:
                target.copy_(numbers[name][: spec.intermediate_size])
            else:
                target.copy_(numbers[name])
    for name, tensor in fresh.items():
        shared[id(empty[name])] = nn.Parameter(tensor, requires_grad=False)
    for name, own in names.items():
        module._parameters[own] = shared[id(empty[name])]
