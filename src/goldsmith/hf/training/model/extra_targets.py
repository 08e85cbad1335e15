"""Training outside the experts: LoRA by peft on named linear layers, and whole routers."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn

from ....core.json_values import parse_json
from ...adapter.coverage import shell
from ...adapter.files import CONFIG, ROOT, WEIGHTS, config_text, serialised
from ...routers import experts_paths, router_weights, routers
from ..errors import TrainingError
from ..options import Options


def check(model: nn.Module, options: Options) -> None:
    """Raises TrainingError for names that cannot be trained in this model, which may be on the meta device."""
    targets = matching_layers(model, options.lora_modules)
    _, by_parameter = _split_by_peft(model, targets)
    if by_parameter and options.dropout:
        raise TrainingError(
            f"--lora-modules {','.join(by_parameter)}: peft adapts these as parameters, for which it has no dropout: "
            "leave out --dropout or these names."
        )
    if not options.train_router:
        return
    if not router_weights(model):
        raise TrainingError(
            "--train-router finds no router in this model: a module gate or router, with weights, next to the experts."
        )
    both_ways = [
        name for name, paths in targets.items() if any(f"{path}.".startswith(_router_prefixes(model)) for path in paths)
    ]
    if both_ways:
        raise TrainingError(
            f"--train-router trains the routers' weights themselves, and --lora-modules {','.join(both_ways)} puts "
            "LoRA on them, which peft does not support in one adapter: leave one of the two out."
        )


def matching_layers(model: nn.Module, names: tuple[str, ...]) -> dict[str, list[str]]:
    """{name: paths of the linear layers and routers that it matches by peft's rule}; TrainingError for other names."""
    experts, router_modules = experts_paths(model), routers(model)
    targets: dict[str, list[str]] = {}
    for name in names:
        matches = {path: m for path, m in model.named_modules() if f".{path}".endswith(f".{name}")}
        inside = [path for path in matches if any(f"{path}.".startswith(f"{one}.") for one in experts)]
        if not matches or inside:
            problem = f"{inside[0]} belongs to the experts" if inside else "no layer of this model has that name"
            raise TrainingError(
                f"--lora-modules {name}: {problem}; the experts' projections get LoRA through --targets."
            )
        for path, module in matches.items():
            weight = getattr(module, "weight", None)
            linear = (
                isinstance(module, nn.Linear) or path in router_modules and weight is not None and weight.dim() == 2
            )
            if not linear:
                raise TrainingError(
                    f"--lora-modules {name}: {path} is of class {type(module).__name__}, not a linear layer."
                )
        targets[name] = list(matches)
    return targets


def add_lora(model: nn.Module, options: Options) -> None:
    """Puts trainable float32 LoRA on the layers of --lora-modules; parameters that are trained already stay trained."""
    if not options.lora_modules:
        return
    from peft import LoraConfig, inject_adapter_in_model

    targets = matching_layers(model, options.lora_modules)
    modules, parameters = _split_by_peft(model, targets)
    trained_before = {name for name, p in model.named_parameters() if p.requires_grad}
    config = LoraConfig(
        r=options.rank,
        lora_alpha=int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules=modules,
        target_parameters=[f"{name}.weight" for name in parameters] or None,
        base_model_name_or_path=options.model,
    )
    inject_adapter_in_model(config, model)
    for name, paths in targets.items():
        untouched = [path for path in paths if not hasattr(model.get_submodule(path), "lora_A")]
        if untouched:
            raise TrainingError(f"--lora-modules {name}: peft added no LoRA to {untouched[0]}; leave this name out.")
    for name, parameter in model.named_parameters():
        if "lora_" in name or name in trained_before:
            parameter.requires_grad_(True)
        if "lora_" in name:
            parameter.data = parameter.data.float()


def _split_by_peft(model: nn.Module, targets: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """The names that peft adapts as modules, and those that it can only adapt as parameters.

    If transformers has fused a model's experts, peft (0.21) takes every gate_proj, up_proj and down_proj for a former
    expert, so those of dense layers and shared experts get no LoRA. So each name is tried on a copy of the
    model without weights. A router is not an nn.Linear, so peft adapts it as a parameter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    modules: list[str] = []
    parameters: list[str] = []
    trained = [(p, p.requires_grad) for p in model.parameters()]
    for name, paths in targets.items():
        copy = shell(model)
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                inject_adapter_in_model(LoraConfig(r=1, target_modules=[name]), copy, low_cpu_mem_usage=True)
        except ValueError:  # peft finds no such module, or requires others with it
            pass
        finally:
            for parameter, flag in trained:
                parameter.requires_grad_(flag)
        wrapped = (copy.get_submodule(path) for path in paths)
        all_as_modules = all(hasattr(layer, "lora_A") and not hasattr(layer, "parameter_name") for layer in wrapped)
        (modules if all_as_modules else parameters).append(name)
    return modules, parameters


def add_routers(folder: Path, model: nn.Module, trained: set[str]) -> None:
    """Adds routers with `trained` parameters to an adapter's files, under `modules_to_save`.

    peft stores whole modules, including tensors that are not trained, such as DeepSeek-V3's e_score_correction_bias.
    """
    places = sorted(path for path in routers(model) if any(name.startswith(f"{path}.") for name in trained))
    if not places:
        return
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, "pt") as file:
        names, metadata = list(file.keys()), file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in names}
    for place in places:
        for name, tensor in model.get_submodule(place).state_dict().items():
            tensors[f"{ROOT}{place}.{name}"] = tensor.cpu().contiguous()
    (folder / WEIGHTS).write_bytes(serialised(tensors, metadata or {}))
    config = parse_json((folder / CONFIG).read_text())
    already = config.get("modules_to_save") or ()
    config["modules_to_save"] = sorted({*already, *(".".join(place.split(".")[-2:]) for place in places)})
    (folder / CONFIG).write_text(config_text(config))


def _router_prefixes(model: nn.Module) -> tuple[str, ...]:
    return tuple(f"{path}." for path in routers(model))
