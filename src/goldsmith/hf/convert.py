"""convert: replaces a transformers model's experts by packed weights with LoRA on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..experts import LoRA, PackedExperts
from .checkpoint.experts import Packing, pack_parts, packed_from
from .checkpoint.gguf.files import SUFFIX
from .checkpoint.loading import load_other_weights
from .checkpoint.opening import open_checkpoint
from .checkpoint.source import WeightSource, check_format
from .converted_experts import ConvertedExperts, converted_modules, freeze_other_parameters
from .dispatch import is_parallel
from .experts_spec import ExpertsSpec, experts_modules, spec_of
from .model_types import base_of
from .peft_methods import replace_methods
from .saving import make_saveable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]
Share = Callable[[Callable[[], PackedExperts]], PackedExperts]


def convert(
    model: nn.Module,
    *,
    format: str = "auto",
    group_size: int | None = None,
    lora: Mapping[str, object] | None = None,
    partitions: int = 1,
    checkpoint: str | Path | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
    share: Share | None = None,
) -> nn.Module:
    """Replaces every experts module of `model` by packed weights, optionally with LoRA; returns the model.

    model       a transformers model. Its experts are packed and freed layer by layer, so at most one layer's experts
                exist twice. On the meta device: the experts are streamed from the checkpoint's shards, and all other
                weights are loaded too, in the model's dtype. A quantised checkpoint's experts are never unpacked
    format      as in `experts.pack`. "auto": bf16, or the checkpoint's own codes if it is quantised; these are never
                requantised. Codes that no format holds exactly are decoded to float32, with a DecodedExperts warning;
                "auto" then is fp32
    group_size  inputs that share a scale (int8, int4, int4_asym)
    lora        keywords of `experts.LoRA`, such as {"rank": 8, "alpha": 16, "targets": ("gate", "up", "down")}. All
                other parameters except peft's adapters are then frozen. None: no LoRA, and nothing is frozen
    partitions  slices along the intermediate size, see `experts.pack`
    checkpoint  a folder of safetensors files, or a GGUF file; default: the folder of the model's config
    progress    called with (done, total, path) after each experts module
    share       receives the function that packs a module's experts, and returns what that function would; with
                `functools.partial(distributed.shared_base, group=distributed.machine_group())`, all ranks of a machine
                map one copy

    The experts' weights leave `model.parameters()` and `state_dict()`, which keep the other weights and the LoRA.
    `model.save_pretrained` writes a folder that loads as this model, experts and LoRA included. Shared experts, dense
    layers and routers stay as they are. Raises ValueError, with nothing changed, for a model without experts modules,
    for experts that cannot be computed (naming class and flag) and for unsupported checkpoints.
    """
    modules = list(experts_modules(model))
    _check_model(model, modules)
    specs = {path: spec_of(module) for path, module in modules}
    source: WeightSource | None = None
    if _on_meta(model):
        source = open_checkpoint(_place(model, checkpoint), model)
        check_format(source, format, specs)
    elif checkpoint is not None:
        raise ValueError(
            "goldsmith.hf.convert: checkpoint is for a model on the meta device, and the weights of this one are "
            "loaded: leave it out"
        )
    if lora is not None:  # a wrong keyword must fail before the first layer is replaced
        spec = next(iter(specs.values()))
        options = lora_keywords(spec, lora)
        LoRA(spec.num_experts, spec.hidden_size, spec.intermediate_size, **{**options, "device": "meta"})
    for done, (path, module) in enumerate(modules, 1):
        spec = specs[path]
        if source is not None:
            make = functools.partial(packed_from, source, path, spec, format, group_size, partitions)
        else:
            make = functools.partial(_pack_module, module, spec, format, group_size, partitions)
        base = make() if share is None else share(make)
        module_lora = None
        if lora is not None:  # on the base's device, whatever torch's default device is
            options = {"device": "cpu", **lora_keywords(spec, lora)}
            module_lora = LoRA(spec.num_experts, spec.hidden_size, spec.intermediate_size, **options)
        converted = ConvertedExperts(base, module_lora, spec=spec, expert_parallel=is_parallel(module), backend=backend)
        _replace(model, path, converted)
        module._parameters.clear()  # frees the weights even if someone still holds the old module
        if progress is not None:
            progress(done, len(modules), path)
    if source is not None:
        load_other_weights(cast("PreTrainedModel", model), source)
    if lora is not None:
        freeze_other_parameters(model)
    make_saveable(base_of(model))
    replace_methods(model)
    return model


def _check_model(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
    kind = type(model).__name__
    if not modules:
        if converted_modules(model):
            raise ValueError(f"goldsmith.hf.convert: the experts of this {kind} are already converted")
        raise ValueError(
            f"goldsmith.hf.convert: {kind} has no experts module that transformers dispatches (a class under "
            "@use_experts_implementation): it is a dense model, or one whose experts goldsmith cannot compute"
        )
    devices = {parameter.device.type for _, module in modules for parameter in module.parameters()} - {"cpu", "meta"}
    if devices:
        raise ValueError(
            f"goldsmith.hf.convert: the experts are on {devices.pop()}, but packed experts run on the CPU: call "
            'model.cpu() first, or keep the experts as they are and use experts_implementation="goldsmith"'
        )
    wrapped = [path for path, _ in modules if path.endswith("base_layer")]
    if wrapped:
        raise ValueError(
            f"goldsmith.hf.convert: peft has wrapped the parameters of {wrapped[0]} (target_parameters). Convert the "
            "plain model, then load the adapter with goldsmith.hf.load_adapter; or keep the wrapping and use "
            'experts_implementation="goldsmith"'
        )


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _place(model: nn.Module, checkpoint: str | Path | None) -> Path:
    name = checkpoint or getattr(model.config, "_name_or_path", None)
    if not name or not (Path(name).is_dir() or Path(name).is_file() and Path(name).suffix == SUFFIX):
        raise ValueError(
            f"goldsmith.hf.convert: the model is on the meta device, and {str(name)!r} is not a checkpoint folder: "
            "pass checkpoint=, the folder with its safetensors files, or a GGUF file"
        )
    return Path(name)


def _pack_module(
    module: nn.Module, spec: ExpertsSpec, format: str, group_size: int | None, partitions: int
) -> PackedExperts:
    packing: Packing = {
        "format": "bf16" if format == "auto" else format,
        "group_size": group_size,
        "partitions": partitions,
    }
    with torch.no_grad():
        return pack_parts({name: getattr(module, name).detach() for name in spec.names}, spec, packing)


def lora_keywords(spec: ExpertsSpec, lora: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `experts.LoRA` for these experts; without a gate, "up" is the only first projection.

    Its factors are named "gate" in `experts.LoRA`, because act(W x) is computed in the place of a gate.
    """
    if spec.gated:
        return dict(lora)
    targets = tuple(lora.get("targets", ("gate", "up", "down")))
    ours = tuple(name for name, of in (("gate", "up"), ("down", "down")) if of in targets)
    if not ours:
        raise ValueError(f"goldsmith.hf.convert: lora's targets are {targets}, but these experts have only up and down")
    changed: dict[str, Any] = {**lora, "targets": ours, "shared_a": False}
    for name in ("rank", "alpha"):  # one number for each target, or one for all
        if isinstance(lora.get(name), Mapping):
            changed[name] = {one: lora[name]["up" if one == "gate" else one] for one in ours}
    return changed


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module.train(model.training))
