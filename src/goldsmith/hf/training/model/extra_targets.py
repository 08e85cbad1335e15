"""What is trained beside the experts: linear layers by name, through peft's own LoRA, and routers whole."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import nn

from ...adapter.coverage import shell
from ...adapter.files import CONFIG, ROOT, WEIGHTS, config_text, serialised
from ...routers import experts_paths, router_weights, routers
from ..errors import TrainingError
from ..options import Options


def check(model: nn.Module, options: Options) -> None:
    """TrainingError for names that cannot be trained in this model, by its modules alone, so that it may be on meta."""
    found = layers(model, options.lora_modules)
    _, by_parameter = _ways(model, found)
    if by_parameter and options.dropout:
        raise TrainingError(
            f"--lora-modules {','.join(by_parameter)}: peft adapts these as parameters, and has no dropout for "
            "parameters: leave --dropout or these names out."
        )
    if not options.train_router:
        return
    if not router_weights(model):
        raise TrainingError(
            "--train-router finds no router in this model: a module gate or router, with weights, beside the experts."
        )
    twice = [name for name, paths in found.items() if any(f"{path}.".startswith(_roots(model)) for path in paths)]
    if twice:
        raise TrainingError(
            f"--train-router trains the routers' weights themselves, and --lora-modules {','.join(twice)} puts LoRA on "
            "them, which peft does not take in one adapter: leave one of the two out."
        )


def layers(model: nn.Module, names: tuple[str, ...]) -> dict[str, list[str]]:
    """{name: the linear layers and routers that it names by peft's rule}; TrainingError for a name of anything else."""
    experts, choosing = experts_paths(model), routers(model)
    found: dict[str, list[str]] = {}
    for name in names:
        here = {path: m for path, m in model.named_modules() if f".{path}".endswith(f".{name}")}
        inside = [path for path in here if any(f"{path}.".startswith(f"{one}.") for one in experts)]
        if not here or inside:
            what = f"{inside[0]} belongs to the experts" if inside else "no layer of this model has that name"
            raise TrainingError(f"--lora-modules {name}: {what}; the experts' projections get LoRA through --targets.")
        for path, module in here.items():
            weight = getattr(module, "weight", None)
            linear = isinstance(module, nn.Linear) or path in choosing and weight is not None and weight.dim() == 2
            if not linear:
                raise TrainingError(
                    f"--lora-modules {name}: {path} is of class {type(module).__name__}, no linear layer."
                )
        found[name] = list(here)
    return found


def put_on(model: nn.Module, options: Options) -> None:
    """LoRA on the layers of --lora-modules, in float32 and trained, beside what is trained already."""
    if not options.lora_modules:
        return
    from peft import LoraConfig, inject_adapter_in_model

    found = layers(model, options.lora_modules)
    modules, parameters = _ways(model, found)
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    config = LoraConfig(
        r=options.rank,
        lora_alpha=int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules=modules,
        target_parameters=[f"{name}.weight" for name in parameters] or None,
        base_model_name_or_path=options.model,
    )
    inject_adapter_in_model(config, model)
    for name, paths in found.items():
        without = [path for path in paths if not hasattr(model.get_submodule(path), "lora_A")]
        if without:
            raise TrainingError(f"--lora-modules {name}: peft has put no LoRA on {without[0]}.")
    for name, parameter in model.named_parameters():
        if "lora_" in name or name in before:
            parameter.requires_grad_(True)
        if "lora_" in name:
            parameter.data = parameter.data.float()


def _ways(model: nn.Module, found: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """The names that peft takes as modules, and those whose weights it can adapt as parameters alone.

    In a model whose experts transformers has fused, peft (0.21) takes gate_proj, up_proj and down_proj for names that
    the experts had before, wherever they stand: a dense layer's and a shared expert's then get nothing. Each name is
    tried on a shell of the model. A router is no Linear, and peft itself makes a parameter of it.
    """
    from peft import LoraConfig, inject_adapter_in_model

    modules: list[str] = []
    parameters: list[str] = []
    trained = [(p, p.requires_grad) for p in model.parameters()]
    for name, paths in found.items():
        like = shell(model)
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                inject_adapter_in_model(LoraConfig(r=1, target_modules=[name]), like, low_cpu_mem_usage=True)
        except ValueError:  # it finds nothing of that name, or wants others with it
            pass
        finally:
            for parameter, flag in trained:
                parameter.requires_grad_(flag)
        put = (like.get_submodule(path) for path in paths)
        whole = all(hasattr(layer, "lora_A") and not hasattr(layer, "parameter_name") for layer in put)
        (modules if whole else parameters).append(name)
    return modules, parameters


def add_routers(folder: Path, model: nn.Module, trained: set[str]) -> None:
    """Puts routers with `trained` parameters into an adapter's files, under `modules_to_save`.

    Whole modules, as peft keeps them: with what nobody trains, as DeepSeek-V3's e_score_correction_bias.
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
    config = json.loads((folder / CONFIG).read_text())
    known = config.get("modules_to_save") or ()
    config["modules_to_save"] = sorted({*known, *(".".join(place.split(".")[-2:]) for place in places)})
    (folder / CONFIG).write_text(config_text(config))


def _roots(model: nn.Module) -> tuple[str, ...]:
    return tuple(f"{path}." for path in routers(model))
