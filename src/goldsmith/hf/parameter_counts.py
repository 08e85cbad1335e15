"""trainable_report: counts of trained parameters and the bytes that a model takes."""

from __future__ import annotations

from torch import nn

from .converted_experts import converted_modules
from .routers import routers

TARGETS = ("gate", "up", "down")


def trainable_report(model: nn.Module) -> dict[str, dict[str, int]]:
    """Numbers of trained parameters by kind, and bytes; all counted, nothing estimated.

    {"trained_parameters": {"total", "expert_lora", "attention_lora", "router", "other"},   numbers of elements
     "expert_lora": {"gate", "up", "down"},             a shared A counts under gate
     "bytes": {"experts", "frozen", "trained"}}         packed experts; other frozen parameters; trained parameters

    router: a router's weights, its bias, and LoRA on it. attention_lora: every other lora_A and lora_B of peft,
    on any module. A parameter that several modules share counts once, as in an optimizer.
    """
    modules = converted_modules(model)
    by_target = {target: 0 for target in TARGETS}
    groups = {"expert_lora": 0, "attention_lora": 0, "router": 0, "other": 0}
    size = {"experts": sum(module.nbytes for module in modules.values()), "frozen": 0, "trained": 0}
    router_prefixes = tuple(f"{path}." for path in routers(model))
    for name, parameter in model.named_parameters():  # gives a shared parameter once
        size["trained" if parameter.requires_grad else "frozen"] += parameter.numel() * parameter.element_size()
        if not parameter.requires_grad:
            continue
        path = next((p for p in modules if name.startswith(p + ".")), None)
        if path is not None:
            groups["expert_lora"] += parameter.numel()
            target = name.rpartition(".")[2].partition("_")[0]
            by_target["up" if target == "gate" and not modules[path].spec.gated else target] += parameter.numel()
        elif name.startswith(router_prefixes):
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
