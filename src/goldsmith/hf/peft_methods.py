"""Methods of peft and transformers that must include the LoRA of converted experts, or refuse.

The LoRA of converted experts is ours, so peft's own methods would pass it by: `disable_adapter` would leave it on, and
a Trainer that resumes would leave it as it is.
"""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from .adapter.loading import load_adapter
from .adapter.saving import save_adapter
from .converted_experts import converted_modules
from .model_types import base_of

if TYPE_CHECKING:
    from peft import PeftModel


def replace_methods(model: nn.Module) -> None:
    """Sets the methods of a converted model and, if it is one, of the PeftModel around it."""
    base = base_of(model)
    _bind(base, disable_adapters=_disable_adapters, enable_adapters=_enable_adapters)
    if base is not model:
        _bind(model, save_pretrained=_save_pretrained, load_adapter=_load_adapter, add_adapter=_add_adapter)
        tuner = cast("PeftModel", model).base_model
        _bind(tuner, disable_adapter_layers=_disable_layers, enable_adapter_layers=_enable_layers)


def _bind(model: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(model, name, MethodType(function, model))


def _enable_lora(model: nn.Module, enabled: bool) -> None:
    for module in converted_modules(model).values():
        module.lora_enabled = enabled


def _disable_adapters(self: Any) -> None:
    """transformers' `disable_adapters`, which turns off the LoRA on converted experts too."""
    _enable_lora(self, False)
    if getattr(self, "_hf_peft_config_loaded", False):
        type(self).disable_adapters(self)


def _enable_adapters(self: Any) -> None:
    """transformers' `enable_adapters`, which turns on the LoRA on converted experts too."""
    _enable_lora(self, True)
    if getattr(self, "_hf_peft_config_loaded", False):
        type(self).enable_adapters(self)


def _disable_layers(self: Any) -> None:
    """peft's `disable_adapter_layers`, on which `disable_adapter` builds, with the LoRA on converted experts."""
    _enable_lora(self, False)
    type(self).disable_adapter_layers(self)


def _enable_layers(self: Any) -> None:
    _enable_lora(self, True)
    type(self).enable_adapter_layers(self)


def _has_lora(model: nn.Module) -> bool:
    return any(module.lora is not None for module in converted_modules(model).values())


def _save_pretrained(self: nn.Module, save_directory: str | Path, **options: object) -> None:
    """peft's `save_pretrained` writes the adapter; with ours it has the experts' LoRA too."""
    if not _has_lora(self):
        cast("Any", type(self)).save_pretrained(self, save_directory, **options)
    elif options.get("is_main_process", True):
        save_adapter(self, save_directory)


def _load_adapter(
    self: nn.Module, model_id: str | Path, adapter_name: str, is_trainable: bool = False, **options: object
) -> object:
    """peft's `load_adapter`; under the name of the adapter that is there it replaces the experts' LoRA too."""
    if not _has_lora(self):
        return cast("Any", type(self)).load_adapter(self, model_id, adapter_name, is_trainable, **options)
    _check_name(self, "load_adapter", adapter_name)
    load_adapter(self, model_id)
    if not is_trainable:
        for name, parameter in self.named_parameters():
            if "lora" in name:
                parameter.requires_grad_(False)
    return None


def _add_adapter(self: nn.Module, adapter_name: str, *arguments: object, **options: object) -> None:
    """peft's `add_adapter`, which could add no LoRA on converted experts."""
    if _has_lora(self):
        _check_name(self, "add_adapter", adapter_name)
    cast("Any", type(self)).add_adapter(self, adapter_name, *arguments, **options)


def _check_name(model: nn.Module, method: str, name: str) -> None:
    names = list(cast("PeftModel", model).peft_config)
    if name not in names:
        raise ValueError(
            f"{method}: adapter_name={name!r}, but converted experts have one LoRA, which belongs to adapter "
            f"{names[0]!r} and would stay on. For the reference model of TRL's DPO give "
            "ref_model=copy.deepcopy(model.get_base_model()), which shares the packed experts. For several adapters "
            "use stock peft with goldsmith.hf.register"
        )
