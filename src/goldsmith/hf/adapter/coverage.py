"""Checks an adapter's config against a converted model before anything in the model changes.

peft matches parameters by the end of their names, and modules by rules of its own. To apply exactly those rules, peft
wraps a shell of the model: new module objects around the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..checkpoint.foreign_errors import brief, explained
from ..routers import first_parameters
from .files import (
    CONFIG,
    DOWN,
    ROOT,
    WEIGHTS,
    AdapterConfig,
    matches_target,
    other_parameters,
    plain_path,
)
from .peft_layers import tensors_of, torch_defaults

if TYPE_CHECKING:
    from peft import LoraConfig

SHOWN = 3  # entries of a long list that a message prints


def targeted(config: AdapterConfig, where: str, first: str) -> list[str]:
    """Which of the experts' parameters at `where` (`first`, down_proj) `target_parameters` names, by peft's rule."""
    targets = config.get("target_parameters") or ()
    return [name for name in (first, DOWN) if any(matches_target(target, [f"{where}.{name}"]) for target in targets)]


def check_targets(path: Path, config: AdapterConfig, model: nn.Module) -> None:
    """Raises ValueError for a target parameter that matches no parameter of the model."""
    names = [
        f"{plain_path(where)}.{name}" for where, first in first_parameters(model).items() for name in (first, DOWN)
    ]
    for target in config.get("target_parameters") or ():
        if not matches_target(target, names) and not matches_target(target, other_parameters(model)):
            raise ValueError(f"{path}: target_parameters has {target!r}, which matches no parameter of this model")


def saved_modules(
    bare: nn.Module, path: Path, config: AdapterConfig, rest: Mapping[str, Tensor], missing: list[str]
) -> dict[str, Tensor]:
    """The model's own tensors that the file replaces whole (`modules_to_save`), by their names in the file.

    bare      the model without peft's layers
    missing   gets the parameters that the file lacks
    Raises ValueError for a wrong shape and for a module that the model does not have.
    """
    shared = _shared_tensors(bare)
    names, whole_tensors, matched = tuple(config.get("modules_to_save") or ()), {}, set()
    for name, tensor in tensors_of(bare):
        module = name.rpartition(".")[0]
        places = [end for end in names if module.endswith(end) or f".{end}." in f".{module}."]
        matched |= set(places)
        saved = rest.get(f"{ROOT}{name}")
        if not places or saved is None and not isinstance(tensor, nn.Parameter):
            continue
        if saved is None:
            missing.append(f"{ROOT}{name}")
        elif id(tensor) in shared:
            raise ValueError(
                f"{path}: modules_to_save replaces {name}, whose tensor the model also uses as {shared[id(tensor)]}: "
                "that would change both; merge this adapter with peft instead"
            )
        elif saved.shape != tensor.shape:
            raise ValueError(f"{ROOT}{name} has the shape {list(saved.shape)}, but {list(tensor.shape)} in the model")
        else:
            whole_tensors[f"{ROOT}{name}"] = tensor
    for module_name in names:
        if module_name not in matched:
            raise ValueError(f"{path}: modules_to_save names {module_name!r}, a module that this model does not have")
    return whole_tensors


def _shared_tensors(model: nn.Module) -> dict[int, str]:
    """The second name of each parameter that has two (tied embeddings), by the parameter's id."""
    first: dict[int, str] = {}
    second: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            second.setdefault(id(parameter), name)
    return second


def check_peft_layers(
    bare: nn.Module, folder: Path, config: AdapterConfig, tensors: Mapping[str, Tensor], missing: list[str]
) -> nn.Module | None:
    """A shell of the model with the layers that peft adds outside the experts (attention); None if it adds none.

    bare      the model without peft's layers
    missing   gets the tensors that the file lacks
    Raises ValueError for a tensor that belongs nowhere in the model or has the wrong shape.
    """
    with explained(str(folder / CONFIG)):
        lora = lora_config(config, bare)
    if not tensors and not lora.target_modules and not lora.target_parameters:
        return None
    if not lora.target_modules and not lora.target_parameters:
        raise ValueError(f"{folder / WEIGHTS}: {next(iter(tensors))} has no place in this model")
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    like = shell(bare)
    trained = [(p, p.requires_grad) for p in bare.parameters()]
    try:
        with torch_defaults():
            inject_adapter_in_model(lora, like, low_cpu_mem_usage=True)
    except Exception as error:  # peft raises many classes for a wrong value
        if isinstance(error, ValueError) and not tensors:
            return None  # no target matched, which is no error in a file without tensors: peft only warns
        raise ValueError(f"{folder / CONFIG}: {brief(error)}") from error
    finally:
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
    ours = tuple(f"{plain_path(path)}." for path in first_parameters(bare))
    state = get_peft_model_state_dict(like, save_embedding_layers=False)
    wanted = {f"{ROOT}{plain_path(key)}": t for key, t in state.items() if not plain_path(key).startswith(ours)}
    for name, tensor in tensors.items():
        if name not in wanted:
            raise ValueError(f"{folder / WEIGHTS}: {name} has no place in this model")
        if wanted[name].shape != tensor.shape:
            raise ValueError(
                f"{folder / WEIGHTS}: {name} has the shape {list(tensor.shape)}, but {list(wanted[name].shape)} in "
                "this model"
            )
    missing += [name for name in wanted if name not in tensors]
    return like


def lora_config(config: AdapterConfig, model: nn.Module) -> LoraConfig:
    """The LoraConfig of all layers outside the experts: trainable, without the experts' parameters or whole modules."""
    from peft import LoraConfig

    fields = {key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__}
    names = other_parameters(model)
    other_targets = [target for target in config.get("target_parameters") or () if matches_target(target, names)]
    changes: AdapterConfig = {"modules_to_save": None, "inference_mode": False, "init_lora_weights": True}
    changes["target_parameters"] = other_targets or None
    return LoraConfig(**(fields | changes))


def shell(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of the module tree around the same tensors: changing its structure does not change the model."""
    copies = {} if copies is None else copies
    if id(module) not in copies:
        copy = copies[id(module)] = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        copy.__dict__["_parameters"] = dict(module._parameters)
        copy.__dict__["_state_dict_pre_hooks"] = {}  # an offloaded model refuses state_dict, but its shell has one
        copy.__dict__["_modules"] = {
            name: None if child is None else shell(child, copies) for name, child in module._modules.items()
        }
    return copies[id(module)]


def refuse_missing(folder: Path, missing: Iterable[str]) -> None:
    """Raises one ValueError for everything that the config covers but the file lacks."""
    names = sorted(set(missing))
    if not names:
        return
    places = sorted({_owner(name).removeprefix(ROOT).removesuffix(".base_layer") for name in names})
    raise ValueError(
        f"{folder / WEIGHTS}: {CONFIG} covers {_first_few(places)}, but the file has no {_first_few(names)}. The file "
        "is truncated or belongs to a model with other layers. Nothing was changed"
    )


def _owner(name: str) -> str:
    """The path of the module that an adapter's tensor belongs to."""
    return name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]


def _first_few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
