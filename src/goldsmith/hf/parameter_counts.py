"""What is trained and what is held: counted, not estimated."""

from __future__ import annotations

from torch import nn

from .converted_experts import converted_modules
from .routers import routers

TARGETS = ("gate", "up", "down")


def trainable_report(model: nn.Module) -> dict[str, dict[str, int]]:
    """What an optimizer over this model's trainable parameters would hold, and the bytes that the model takes.

    {"trained_parameters": {"total", "expert_lora", "attention_lora", "router", "other"},   numbers of elements
     "expert_lora": {"gate", "up", "down"},             a shared A counts under gate
     "bytes": {"experts", "frozen", "trained"}}         packed bases; other frozen parameters; trained parameters

    router is what a router holds, with its bias and a LoRA on it; attention_lora is every other adapter of peft's
    (lora_A and lora_B, wherever they sit). Each parameter counts once, as an optimizer counts it.
    """
    modules = converted_modules(model)
    by_target = {target: 0 for target in TARGETS}
    groups = {"expert_lora": 0, "attention_lora": 0, "router": 0, "other": 0}
    size = {"experts": sum(module.nbytes for module in modules.values()), "frozen": 0, "trained": 0}
    choosing = tuple(f"{path}." for path in routers(model))
    for name, parameter in model.named_parameters():  # a shared parameter is named once
        size["trained" if parameter.requires_grad else "frozen"] += parameter.numel() * parameter.element_size()
        if not parameter.requires_grad:
            continue
        path = next((p for p in modules if name.startswith(p + ".")), None)
        if path is not None:
            groups["expert_lora"] += parameter.numel()
            by_target[name.rpartition(".")[2].partition("_")[0]] += parameter.numel()
        elif name.startswith(choosing):
            groups["router"] += parameter.numel()
        elif "lora_" in name:
            groups["attention_lora"] += parameter.numel()
        else:
            groups["other"] += parameter.numel()
    return {
        "trained_parameters": {"total": sum(groups.values()), **groups},
        "expert_lora": by_target,
        "bytes": size,
    }
