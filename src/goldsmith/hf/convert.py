"""convert: a transformers model's experts as packed bases with LoRA on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..experts import LoRA, PackedExperts, pack
from .checkpoint.experts import packed_from
from .checkpoint.loading import load_rest
from .checkpoint.reader import ModelCheckpoint
from .converted_experts import ConvertedExperts, converted_modules, freeze_the_rest
from .dispatch import is_parallel
from .experts_spec import ExpertsSpec, experts_modules, spec_of
from .model_types import ExpertsModule, base_of

Progress = Callable[[int, int, str], None]


def convert(
    model: nn.Module,
    *,
    format: str = "auto",
    group_size: int | None = None,
    lora: Mapping[str, Any] | None = None,
    partitions: int = 1,
    checkpoint: str | Path | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> nn.Module:
    """Replaces every experts module of `model` by a packed base, with a LoRA on it if asked for; returns the model.

    model       a transformers model. Layer by layer its experts are packed and let go, so that one layer's at most
                exist twice. On the meta device: they are streamed from the checkpoint's shards, and all other weights
                loaded too, in the model's dtype; of a quantised checkpoint's experts no float copy is ever made
    format      of `experts.pack`; "auto" is bf16, and for a quantised checkpoint (compressed-tensors int4, AWQ int4,
                fp8 with 128 x 128 blocks, mxfp4) its own codes, which are never quantised again
    group_size  inputs that share a scale (int8, int4, int4_asym)
    lora        keywords of `experts.LoRA`, as {"rank": 8, "alpha": 16, "targets": ("gate", "up", "down")}. All other
                parameters are then frozen, adapters of peft's excepted; None: no LoRA, and nothing is frozen
    partitions  slices along the intermediate size, see `experts.pack`
    checkpoint  a folder of safetensors files; default: where the model's config was read
    progress    is told (done, all, path) after each experts module

    The experts leave `model.parameters()`, and so `state_dict()` and `save_pretrained`: those keep the rest, and the
    LoRA. Shared experts, dense layers and routers stay as they are. Raises ValueError for a model without experts
    modules, experts that cannot be computed (class and flag), and checkpoints of another kind, with nothing changed.
    """
    found = list(experts_modules(model))
    _check_model(model, found)
    specs = {path: spec_of(module) for path, module in found}
    source: ModelCheckpoint | None = None
    if _on_meta(model):
        source = ModelCheckpoint(_folder(model, checkpoint), model)
        source.check_format(format)
    elif checkpoint is not None:
        raise ValueError(
            "goldsmith.hf.convert: checkpoint is for a model on the meta device, and the weights of this one are "
            "loaded: leave it out"
        )
    if lora is not None:  # a wrong keyword is said before the first layer is gone
        spec = next(iter(specs.values()))
        LoRA(spec.num_experts, spec.hidden_size, spec.intermediate_size, **{**lora, "device": "meta"})
    for done, (path, module) in enumerate(found, 1):
        spec = specs[path]
        if source is not None:
            base = packed_from(source, path, spec, format, group_size, partitions)
        else:
            base = _pack_module(cast("ExpertsModule", module), spec, format, group_size, partitions)
        ours = None
        if lora is not None:  # where its base is, whatever torch's default device
            ours = LoRA(spec.num_experts, spec.hidden_size, spec.intermediate_size, **{"device": "cpu", **lora})
        made = ConvertedExperts(base, ours, spec=spec, expert_parallel=is_parallel(module), backend=backend)
        _replace(model, path, made)
        module._parameters.clear()  # whoever still holds the module does not hold its weights
        if progress is not None:
            progress(done, len(found), path)
    if source is not None:
        load_rest(base_of(model), source)
    if lora is not None:
        freeze_the_rest(model)
    return model


def _check_model(model: nn.Module, found: list[tuple[str, nn.Module]]) -> None:
    kind = type(model).__name__
    if not found:
        if converted_modules(model):
            raise ValueError(f"goldsmith.hf.convert: the experts of this {kind} are converted already")
        raise ValueError(
            f"goldsmith.hf.convert: {kind} has no experts module that transformers dispatches (a class under "
            "@use_experts_implementation): there is nothing to convert"
        )
    places = {parameter.device.type for _, module in found for parameter in module.parameters()} - {"cpu", "meta"}
    if places:
        raise ValueError(
            f"goldsmith.hf.convert: the experts are on {places.pop()}, and packed experts are computed on the CPU: "
            'model.cpu() first; or leave them as they are and take experts_implementation="goldsmith"'
        )
    wrapped = [path for path, _ in found if path.endswith("base_layer")]
    if wrapped:
        raise ValueError(
            f"goldsmith.hf.convert: peft has wrapped the parameters of {wrapped[0]} (target_parameters). Convert the "
            "plain model, then read the adapter with goldsmith.hf.load_adapter; or leave the wrapping and take "
            'experts_implementation="goldsmith"'
        )


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _folder(model: nn.Module, checkpoint: str | Path | None) -> Path:
    name = checkpoint or getattr(model.config, "_name_or_path", None)
    if not name or not Path(name).is_dir():
        raise ValueError(
            f"goldsmith.hf.convert: the model is on the meta device, and {str(name)!r} is no folder of a checkpoint: "
            "give checkpoint=, the folder with its safetensors files"
        )
    return Path(name)


def _pack_module(
    module: ExpertsModule, spec: ExpertsSpec, format: str, group_size: int | None, partitions: int
) -> PackedExperts:
    with torch.no_grad():
        return pack(
            module.gate_up_proj.detach(),
            module.down_proj.detach(),
            format="bf16" if format == "auto" else format,
            group_size=group_size,
            gate_up_bias=module.gate_up_proj_bias.detach() if spec.biased else None,
            down_bias=module.down_proj_bias.detach() if spec.biased else None,
            transposed=spec.transposed,
            interleaved=spec.interleaved,
            partitions=partitions,
        )


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module.train(model.training))
