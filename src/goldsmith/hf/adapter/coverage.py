"""What an adapter's config covers in a converted model, before anything of the model is changed.

peft finds parameters by the end of their name, and modules by rules of its own, which are asked for here: its wrappers
are put on a shell of the model, other module objects around the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..converted_experts import converted_modules
from .files import CONFIG, DOWN, GATE_UP, ROOT, WEIGHTS, AdapterConfig, is_named, parameters_beside, stripped
from .peft_layers import tensors_of, usual_defaults

if TYPE_CHECKING:
    from peft import LoraConfig

SHOWN = 3  # of a long list


def targeted(config: AdapterConfig, where: str) -> list[str]:
    """gate_up_proj and down_proj of the experts at `where`, those that target_parameters names, by peft's rule."""
    given = config.get("target_parameters") or ()
    return [name for name in (GATE_UP, DOWN) if any(is_named(target, [f"{where}.{name}"]) for target in given)]


def check_targets(path: Path, config: AdapterConfig, model: nn.Module) -> None:
    """ValueError for a target parameter that neither the converted experts have nor anything beside them."""
    names = [f"{stripped(where)}.{name}" for where in converted_modules(model) for name in (GATE_UP, DOWN)]
    for target in config.get("target_parameters") or ():
        if not is_named(target, names) and not is_named(target, parameters_beside(model)):
            raise ValueError(
                f"{path}: target_parameters has {target!r}, which no experts of this model have, nor anything else"
            )


def saved_modules(
    bare: nn.Module, path: Path, config: AdapterConfig, rest: Mapping[str, Tensor], missing: list[str]
) -> dict[str, Tensor]:
    """The model's own tensors that the file has whole, by their names there; parameters that it lacks to `missing`.

    bare   the model without peft's layers. ValueError for another shape, and for a module that is not there.
    """
    names, found, met = tuple(config.get("modules_to_save") or ()), {}, set()
    for own, tensor in tensors_of(bare):
        module = own.rpartition(".")[0]
        places = [name for name in names if module.endswith(name) or f".{name}." in f".{module}."]
        met |= set(places)
        given = rest.get(f"{ROOT}{own}")
        if not places or given is None and not isinstance(tensor, nn.Parameter):
            continue
        if given is None:
            missing.append(f"{ROOT}{own}")
        elif given.shape != tensor.shape:
            raise ValueError(f"{ROOT}{own} is {list(given.shape)}, and {list(tensor.shape)} in the model")
        else:
            found[f"{ROOT}{own}"] = tensor
    for name in names:
        if name not in met:
            raise ValueError(f"{path}: modules_to_save has {name!r}, which this model does not have")
    return found


def check_beside(
    bare: nn.Module, folder: Path, config: AdapterConfig, tensors: Mapping[str, Tensor], missing: list[str]
) -> nn.Module | None:
    """Of what peft puts on other modules (attention): ValueError for what has no place, or another shape, there.

    bare   the model without peft's layers. What the file lacks is added to `missing`. Returns a shell of the model
           with what peft puts in, None where that is nothing.
    """
    lora = lora_config(config, bare)
    if not tensors and not lora.target_modules and not lora.target_parameters:
        return None
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    like = shell(bare)
    trained = [(p, p.requires_grad) for p in bare.parameters()]
    try:
        with usual_defaults():
            inject_adapter_in_model(lora, like, low_cpu_mem_usage=True)
    except ValueError as error:
        if not tensors:  # nothing is targeted, and nothing is there: peft warns, and so it has always been
            return None
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    finally:
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
    ours = tuple(f"{stripped(path)}." for path in converted_modules(bare))
    state = get_peft_model_state_dict(like, save_embedding_layers=False)
    wanted = {f"{ROOT}{stripped(key)}": t for key, t in state.items() if not stripped(key).startswith(ours)}
    for name, tensor in tensors.items():
        if name not in wanted:
            raise ValueError(f"{folder / WEIGHTS}: {name} has no place in this model")
        if wanted[name].shape != tensor.shape:
            raise ValueError(
                f"{folder / WEIGHTS}: {name} is {list(tensor.shape)}, and {list(wanted[name].shape)} in this model"
            )
    missing += [name for name in wanted if name not in tensors]
    return like


def lora_config(config: AdapterConfig, model: nn.Module) -> LoraConfig:
    """peft's config of what is not the experts': to be trained, without their parameters and modules_to_save."""
    from peft import LoraConfig

    own = {key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__}
    names = parameters_beside(model)
    beside = [target for target in config.get("target_parameters") or () if is_named(target, names)]
    changes: AdapterConfig = {"modules_to_save": None, "inference_mode": False, "init_lora_weights": True}
    changes["target_parameters"] = beside or None
    return LoraConfig(**(own | changes))


def shell(module: nn.Module, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """The same tree of modules in new objects, around the same tensors: what is put into it is not in the model."""
    made = {} if made is None else made
    if id(module) not in made:
        copy = made[id(module)] = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        copy.__dict__["_parameters"] = dict(module._parameters)
        copy.__dict__["_modules"] = {
            name: None if child is None else shell(child, made) for name, child in module._modules.items()
        }
    return made[id(module)]


def refuse_missing(folder: Path, missing: Iterable[str]) -> None:
    """One ValueError for all that the config covers and the file has no tensors for: places, and names."""
    names = sorted(set(missing))
    if not names:
        return
    places = sorted({_owner(name).removeprefix(ROOT).removesuffix(".base_layer") for name in names})
    raise ValueError(
        f"{folder / WEIGHTS}: {CONFIG} covers {_some(places)}, and the file has no {_some(names)}: it was cut, or is "
        "for a model with other layers; nothing was changed"
    )


def _owner(name: str) -> str:
    """The module that a tensor of an adapter belongs to."""
    return name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
