"""The part of an adapter outside the experts: peft's LoRA on other modules, and modules that it replaces whole.

Loading an adapter replaces the previous one. peft's layers of the previous adapter are removed, unless the new one has
the same layers. Modules that it replaced whole (a router, under `modules_to_save`) get the model's own weights back;
the model keeps a copy of these from the moment an adapter first overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..model_types import base_of
from .files import ROOT, WHOLE_MODULES, keeps_base_weights

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel, PeftModel

# key in the model's __dict__: {name: the model's own tensor} for every tensor that the current adapter overwrote
OVERWRITTEN = "_goldsmith_own"


def adapter_name_of(model: nn.Module) -> str | None:
    """The name of the model's peft adapter, None without one. Raises ValueError for one that cannot be replaced."""
    adapters = getattr(model, "peft_config", None) or {}
    if not adapters:
        return None
    reason = None
    if len(adapters) > 1:
        reason = (
            f"the model has the adapters {sorted(adapters)}, and only one can be replaced: call delete_adapter() for "
            "the others first"
        )
    name, config = next(iter(adapters.items()))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        reason = f"the model's adapter {name!r} is {kind}, and only LoRA can be replaced"
    elif not keeps_base_weights(config.init_lora_weights):
        reason = f"init_lora_weights={config.init_lora_weights!r} of adapter {name!r} has changed the base weights"
    elif any(getattr(module, "merged", False) for module in _peft_layers(model).values()):
        reason = f"the model's adapter {name!r} is merged: call unmerge_adapter() first"
    if reason:
        raise ValueError(f"goldsmith.hf.load_adapter: {reason}; nothing was changed")
    return str(name)


def remove_peft_layers(model: nn.Module) -> None:
    """Puts every module that peft has wrapped back into its place, in this model."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            while child is not None and _is_peft_layer(child):
                child = child.get_submodule("base_layer" if hasattr(child, "base_layer") else "original_module")
            module._modules[name] = child
    model.__dict__.pop("peft_config", None)


@contextmanager
def torch_defaults() -> Iterator[None]:
    """torch's initial defaults, float32 and CPU, with which peft creates its layers; on a shell it never moves them."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def put_peft_layers(
    model: nn.Module, like: nn.Module | None, config: LoraConfig, tensors: Mapping[str, Tensor], name: str | None
) -> None:
    """Installs peft's part of an adapter in place of adapter `name`.

    If the model already has the same layers as the shell `like`, their tensors are overwritten in place. Parameters
    that exist already stay trained or frozen, whatever peft would do.
    """
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    base, peft_model = base_of(model), cast("PeftModel", model)
    trained = [(p, p.requires_grad) for p in model.parameters()]
    peft_tensors = {key.removeprefix(ROOT): tensor for key, tensor in tensors.items()}
    adapter_name = name or "default"
    if name is None or like is None or _layer_kinds(base, name) != _layer_kinds(like, "default"):
        remove_peft_layers(base)
        if base is not model:  # keep the PeftModel that wraps it
            tuner = cast("LoraModel", peft_model.base_model)
            base.peft_config = cast("Any", tuner.peft_config)
            tuner.peft_config[adapter_name] = config
            tuner.targeted_module_names, tuner.targeted_parameter_names = [], []
            if peft_tensors:
                with torch_defaults():
                    tuner.inject_adapter(base, adapter_name)
        else:
            if getattr(base, "_hf_peft_config_loaded", False):
                base._hf_peft_config_loaded = bool(peft_tensors)
            if peft_tensors:
                with torch_defaults():
                    inject_adapter_in_model(config, base, adapter_name)
    else:
        peft_model.peft_config[adapter_name] = config
    for parameter, flag in trained:
        parameter.requires_grad_(flag)
    if peft_tensors:
        outcome: Any = set_peft_model_state_dict(base, peft_tensors, adapter_name=adapter_name)
        if outcome.unexpected_keys:
            raise ValueError(f"goldsmith.hf.load_adapter: {outcome.unexpected_keys[0]} has no place in this model")


def restore_overwritten(model: nn.Module, bare: nn.Module) -> None:
    """Copies the model's own numbers back over everything that an adapter overwrote."""
    current = dict(tensors_of(bare))
    with torch.no_grad():
        for name, original in base_of(model).__dict__.pop(OVERWRITTEN, {}).items():
            current[name].copy_(original)
    base_of(model).__dict__.pop(WHOLE_MODULES, None)


def remember_overwritten(model: nn.Module, bare: nn.Module, written: Mapping[str, Tensor]) -> None:
    """Keeps a copy of the model's own tensors that are about to be overwritten."""
    current = dict(tensors_of(bare))
    names = (name.removeprefix(ROOT).replace(".base_layer.", ".") for name in written)
    base_of(model).__dict__[OVERWRITTEN] = {name: current[name].detach().clone() for name in names if name in current}


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and persistent buffers, by name."""
    buffers = [
        (f"{path}.{name}".removeprefix("."), buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    return [*model.named_parameters(), *buffers]


def _is_peft_layer(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def _peft_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if _is_peft_layer(module)}


def _layer_kinds(model: nn.Module, name: str) -> dict[str, tuple[object, ...]]:
    """By path: everything that determines what a peft layer computes, except the values of its factors."""
    return {
        path: (
            type(layer),
            dict(getattr(layer, "scaling", {})).get(name),
            getattr(dict(getattr(layer, "lora_dropout", {})).get(name), "p", 0.0),
            getattr(layer, "disable_adapters", False),
            [active == name for active in getattr(layer, "active_adapters", [name])],
            sorted(
                (key.replace(f".{name}", ""), p.shape, p.dtype)
                for key, p in layer.named_parameters()
                if f".{name}" in f".{key}"
            ),
        )
        for path, layer in _peft_layers(model).items()
    }
