"""The routers of a model: the modules that choose experts."""

from __future__ import annotations

from torch import nn

from .converted_experts import ConvertedExperts
from .experts_spec import is_experts, spec_of

NAMES = ("gate", "router")


def experts_paths(model: nn.Module) -> list[str]:
    """Paths of all experts modules, converted or not."""
    return [path for path, m in model.named_modules() if is_experts(m) or isinstance(m, ConvertedExperts)]


def first_parameters(model: nn.Module) -> dict[str, str]:
    """{path of an experts module: the name of its first projection's parameter}."""
    modules = {path: model.get_submodule(path) for path in experts_paths(model)}
    return {path: (m.spec if isinstance(m, ConvertedExperts) else spec_of(m)).first for path, m in modules.items()}


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """{path: module} of every router: a `gate` or `router` next to experts, wrapped by peft's layer if it has LoRA."""
    blocks = {path.rpartition(".")[0] for path in experts_paths(model)}
    split = ((path, *path.rpartition(".")[::2], module) for path, module in model.named_modules())
    return {path: module for path, block, name, module in split if name in NAMES and block in blocks}


def router_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The routers' own parameters by name, at any depth, also inside peft's layers; without LoRA factors."""
    return {
        f"{path}.{name}": parameter
        for path, module in routers(model).items()
        for name, parameter in module.named_parameters()
        if ".lora_" not in f".{name}"
    }
