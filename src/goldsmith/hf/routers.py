"""Which modules of a model choose experts."""

from __future__ import annotations

from torch import nn

from .converted_experts import ConvertedExperts
from .experts_spec import is_experts

NAMES = ("gate", "router")


def experts_paths(model: nn.Module) -> list[str]:
    """Of every experts module, converted or not yet."""
    return [path for path, m in model.named_modules() if is_experts(m) or isinstance(m, ConvertedExperts)]


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """{path: module} of every router: `gate` or `router` beside experts; peft's layer on it where there is one."""
    beside = {path.rpartition(".")[0] for path in experts_paths(model)}
    split = ((path, *path.rpartition(".")[::2], module) for path, module in model.named_modules())
    return {path: module for path, block, name, module in split if name in NAMES and block in beside}


def router_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The routers' own parameters, however deep in them, through peft's layers and without a LoRA's."""
    return {
        f"{path}.{name}": parameter
        for path, module in routers(model).items()
        for name, parameter in module.named_parameters()
        if ".lora_" not in f".{name}"
    }
