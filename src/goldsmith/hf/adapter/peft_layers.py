"""What an adapter has beside the experts: peft's LoRA on other modules, and weights that it brings whole.

An adapter that is read takes the place of the one before it. peft's layers of that one are taken off, unless the new
one has the same, and weights that it brought whole (a router, under `modules_to_save`) go back to the model's own,
which are kept in the model from the first time that they are written over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..model_types import base_of
from .files import ROOT, SAVED, is_plain_start

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel, PeftModel

OWN = "_goldsmith_own"  # in the model's __dict__: {name: the model's own numbers} of what an adapter wrote over


def adapter_of(model: nn.Module) -> str | None:
    """The name of the adapter that peft has in this model. Raises ValueError for one that cannot be taken off."""
    found = getattr(model, "peft_config", None) or {}
    if not found:
        return None
    why = None
    if len(found) > 1:
        why = f"it has the adapters {sorted(found)}, and one at most is replaced: delete_adapter of the others first"
    name, config = next(iter(found.items()))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        why = f"its adapter {name!r} is {kind}, and LoRA alone is replaced"
    elif not is_plain_start(config.init_lora_weights):
        why = f"init_lora_weights={config.init_lora_weights!r} of its adapter {name!r} has changed the weights under it"
    elif any(getattr(module, "merged", False) for module in _layers(model).values()):
        why = f"its adapter {name!r} is merged: unmerge_adapter() first"
    if why:
        raise ValueError(f"goldsmith.hf.load_adapter: {why}; nothing was changed")
    return str(name)


def take_off(model: nn.Module) -> None:
    """The model without peft's layers: what they wrap is in their place."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            while child is not None and _is_peft_s(child):
                child = child.get_submodule("base_layer" if hasattr(child, "base_layer") else "original_module")
            module._modules[name] = child
    model.__dict__.pop("peft_config", None)


@contextmanager
def usual_defaults() -> Iterator[None]:
    """torch's own default dtype and device: peft makes its layers of them, and on a shell leaves them so."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def put_in(
    model: nn.Module, like: nn.Module | None, config: LoraConfig, tensors: Mapping[str, Tensor], name: str | None
) -> None:
    """peft's part of an adapter, in place of `name`'s; into its own tensors where its layers are as those of `like`.

    Whether peft would have it trained or frozen, what is there already stays as it is.
    """
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    base, peft_model = base_of(model), cast("PeftModel", model)
    trained = [(p, p.requires_grad) for p in model.parameters()]
    given = {key.removeprefix(ROOT): tensor for key, tensor in tensors.items()}
    now = name or "default"
    if name is None or like is None or _kinds(base, name) != _kinds(like, "default"):
        take_off(base)
        if base is not model:  # a PeftModel stays one
            tuner = cast("LoraModel", peft_model.base_model)
            base.peft_config = cast("Any", tuner.peft_config)
            tuner.peft_config[now] = config
            tuner.targeted_module_names, tuner.targeted_parameter_names = [], []
            if given:
                with usual_defaults():
                    tuner.inject_adapter(base, now)
        else:
            if getattr(base, "_hf_peft_config_loaded", False):
                base._hf_peft_config_loaded = bool(given)
            if given:
                with usual_defaults():
                    inject_adapter_in_model(config, base, now)
    else:
        peft_model.peft_config[now] = config
    for parameter, flag in trained:
        parameter.requires_grad_(flag)
    if given:
        told: Any = set_peft_model_state_dict(base, given, adapter_name=now)
        if told.unexpected_keys:
            raise ValueError(f"goldsmith.hf.load_adapter: {told.unexpected_keys[0]} has no place in this model")


def restore(model: nn.Module, bare: nn.Module) -> None:
    """The model's own numbers again, wherever an adapter wrote over them."""
    held = dict(tensors_of(bare))
    with torch.no_grad():
        for name, own in base_of(model).__dict__.pop(OWN, {}).items():
            held[name].copy_(own)
    base_of(model).__dict__.pop(SAVED, None)


def keep(model: nn.Module, bare: nn.Module, written: Mapping[str, Tensor]) -> None:
    """Keeps the model's own numbers of what is about to be written over."""
    held = dict(tensors_of(bare))
    plain = (name.removeprefix(ROOT).replace(".base_layer.", ".") for name in written)
    base_of(model).__dict__[OWN] = {name: held[name].detach().clone() for name in plain if name in held}


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, and the buffers that files hold."""
    kept = [
        (f"{path}.{name}".removeprefix("."), buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    return [*model.named_parameters(), *kept]


def _is_peft_s(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if _is_peft_s(module)}


def _kinds(model: nn.Module, name: str) -> dict[str, tuple[object, ...]]:
    """What a layer of peft's computes, but for the numbers of its factors."""
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
        for path, layer in _layers(model).items()
    }
