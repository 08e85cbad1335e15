"""load_adapter: reads a peft adapter into a converted model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...experts import LoRA
from ..converted_experts import ConvertedExperts, converted_modules, freeze_other_parameters
from ..model_types import base_of
from .coverage import check_peft_layers, check_targets, lora_config, refuse_missing, saved_modules, shell
from .files import CONFIG, ROOT, WHOLE_MODULES, plain_path
from .fusing import fused
from .layout import Pair
from .peft_layers import adapter_name_of, put_peft_layers, remember_overwritten, remove_peft_layers, restore_overwritten
from .peft_names import by_names_in_model
from .reading import factors_in_file, read_adapter, split_factors


def load_adapter(model: nn.Module, directory: str | Path) -> nn.Module:
    """Loads a peft adapter into a converted model and returns the model; the experts' part becomes `experts.LoRA`.

    Accepts any adapter with `target_parameters` on the experts, written by goldsmith or stock peft, also with LoRA on
    a router. The adapter replaces the one in the model: the result is as if the model had had none.

    Experts: a LoRA with the same ranks and scalings, in a dtype that holds the file's numbers, is overwritten in place,
    so an optimizer keeps its tensors. Otherwise it is replaced (float32 is never rounded to bfloat16), and targets that
    this adapter does not cover lose their LoRA. In that case, create the optimizer after loading.
    Other modules (attention): peft itself adds its layers, trainable.
    `modules_to_save` (a router): their weights overwrite the model's own. Loading the next adapter restores those.
    A model converted without `lora` gets its first LoRA here; all other parameters are frozen, as `convert` does.

    Raises ValueError, with the model unchanged, if files are missing or damaged, belong to another model, lack tensors
    that the config covers, or use options that experts do not support; or if the model has several peft adapters, a
    merged one, or one that is not LoRA.
    """
    modules = converted_modules(model)
    if not modules:
        raise ValueError(
            "goldsmith.hf.load_adapter: no experts of this model are converted: call goldsmith.hf.convert(model) "
            "first. For the plain model, use peft.PeftModel.from_pretrained"
        )
    folder = Path(directory)
    old_adapter = adapter_name_of(model)
    config, tensors, ranks = read_adapter(folder, "goldsmith.hf.load_adapter")
    config, tensors = fused(model, folder, config, tensors)
    tensors = by_names_in_model(model, tensors, ROOT)
    check_targets(folder / CONFIG, config, model)
    new_factors: dict[str, tuple[dict[str, Pair], dict[str, float], bool]] = {}
    used: set[str] = set()
    missing: list[str] = []
    for path, module in modules.items():
        by_parameter = factors_in_file(folder, config, tensors, plain_path(path), module.spec, used, missing)
        if by_parameter:
            new_factors[path] = split_factors(module.spec, by_parameter, ranks.get(plain_path(path)))
    other_tensors = {name: t for name, t in tensors.items() if name not in used}
    unknown = [name for name in other_tensors if ".experts." in name]
    if unknown or not new_factors:
        problem = (
            f"{unknown[0]} has no place in this model" if unknown else "it has no tensors for this model's experts"
        )
        raise ValueError(f"{folder}: {problem}; the adapter's target_parameters are {config.get('target_parameters')}")
    model_shell = shell(base_of(model))
    remove_peft_layers(model_shell)
    whole_modules = saved_modules(model_shell, folder / CONFIG, config, other_tensors, missing)
    peft_tensors = {name: t for name, t in other_tensors.items() if name not in whole_modules}
    peft_shell = check_peft_layers(model_shell, folder, config, peft_tensors, missing)
    refuse_missing(folder, missing)
    restore_overwritten(model, model_shell)
    remember_overwritten(model, model_shell, other_tensors)
    if peft_tensors or old_adapter is not None:
        put_peft_layers(model, peft_shell, lora_config(config, model_shell), peft_tensors, old_adapter)
    with torch.no_grad():
        for name, tensor in whole_modules.items():
            tensor.copy_(other_tensors[name])
    if config.get("modules_to_save"):
        base_of(model).__dict__[WHOLE_MODULES] = config["modules_to_save"]
    had_no_lora = all(module.lora is None for module in modules.values())
    for path, module in modules.items():
        if path in new_factors:
            _write_factors(module, *new_factors[path])
        else:
            module.lora = None
    if had_no_lora:
        freeze_other_parameters(model)
    return model


def _write_factors(module: ConvertedExperts, factors: dict[str, Pair], scaling: dict[str, float], shared: bool) -> None:
    """Writes into the existing LoRA if ranks, scalings and dtype allow it, otherwise into a new one."""
    spec, old = module.spec, module.lora
    like = next(iter(factors.values()))[0]
    rank = {name: a.shape[1] for name, (a, _) in factors.items()}
    same = (
        old is not None
        and old.shared_a == shared
        and dict(old.scaling) == scaling
        and {name: a.shape[1] for name, (a, _) in old.factors().items()} == rank
        and all(torch.promote_types(p.dtype, like.dtype) == p.dtype for p in old.parameters())
    )
    if not same:
        old = LoRA(
            spec.num_experts,
            spec.hidden_size,
            spec.intermediate_size,
            rank=rank,
            alpha={name: scaling[name] * rank[name] for name in factors},
            targets=tuple(factors),
            dropout=0.0 if old is None else old.dropout,
            shared_a=shared,
            dtype=like.dtype,
            device=module.base_tensors[0].device,
        )
        module.lora = old.train(module.training)
    if old is None:
        raise ValueError("goldsmith.hf.load_adapter: the experts have no LoRA to load into")
    with torch.no_grad():
        for name, (a, b) in factors.items():
            ours = old.factors()[name]
            ours[0].copy_(a)
            ours[1].copy_(b)
