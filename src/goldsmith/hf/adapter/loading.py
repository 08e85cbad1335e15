"""load_adapter: reads a peft adapter into a converted model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...experts import LoRA
from ..converted_experts import ConvertedExperts, converted_modules, freeze_other_parameters
from ..model_types import base_of
from . import layout
from .coverage import check_peft_layers, check_targets, lora_config, refuse_missing, saved_modules, shell, targeted
from .files import (
    CONFIG,
    DOWN,
    GATE_UP,
    RANKS,
    REFUSED,
    ROOT,
    WEIGHTS,
    WHOLE_MODULES,
    AdapterConfig,
    keeps_base_weights,
    pattern_value,
    plain_path,
)
from .layout import Pair, PeftFactors
from .peft_layers import adapter_name_of, put_peft_layers, remember_overwritten, remove_peft_layers, restore_overwritten


def load_adapter(model: nn.Module, directory: str | Path) -> nn.Module:
    """Loads a peft adapter into a converted model and returns the model; the experts' part becomes `experts.LoRA`.

    Accepts any adapter with `target_parameters` on the experts, written by goldsmith or stock peft, also with LoRA on
    a router. The adapter replaces the one in the model: the result is the same as if it had been loaded first.

    Experts: a LoRA with the same ranks and scalings, in a dtype that holds the file's numbers, is overwritten in place,
    so an optimizer keeps its tensors. Otherwise it is replaced (float32 is never rounded to bfloat16), and targets that
    this adapter does not cover lose their LoRA. Create the optimizer afterwards.
    Other modules (attention): peft itself adds its layers, trainable.
    `modules_to_save` (a router): their weights overwrite the model's own, which return when the next adapter is loaded.
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
    replaced = adapter_name_of(model)
    config, tensors, ranks = _read(folder)
    check_targets(folder / CONFIG, config, model)
    planned: dict[str, tuple[dict[str, Pair], dict[str, float], bool]] = {}
    used: set[str] = set()
    missing: list[str] = []
    for path, module in modules.items():
        by_parameter = _factors_in_file(folder, config, tensors, plain_path(path), module, used, missing)
        if by_parameter:
            planned[path] = _factors(module, by_parameter, ranks.get(plain_path(path)))
    rest = {name: t for name, t in tensors.items() if name not in used}
    unknown = [name for name in rest if ".experts." in name]
    if unknown or not planned:
        problem = (
            f"{unknown[0]} has no place in this model" if unknown else "it has no tensors for this model's experts"
        )
        raise ValueError(f"{folder}: {problem}; the adapter's target_parameters are {config.get('target_parameters')}")
    bare = shell(base_of(model))
    remove_peft_layers(bare)
    whole_modules = saved_modules(bare, folder / CONFIG, config, rest, missing)
    peft_tensors = {name: t for name, t in rest.items() if name not in whole_modules}
    peft_shell = check_peft_layers(bare, folder, config, peft_tensors, missing)
    refuse_missing(folder, missing)
    restore_overwritten(model, bare)
    remember_overwritten(model, bare, rest)
    if peft_tensors or replaced is not None:
        put_peft_layers(model, peft_shell, lora_config(config, bare), peft_tensors, replaced)
    with torch.no_grad():
        for name, tensor in whole_modules.items():
            tensor.copy_(rest[name])
    if config.get("modules_to_save"):
        base_of(model).__dict__[WHOLE_MODULES] = config["modules_to_save"]
    had_none = all(module.lora is None for module in modules.values())
    for path, module in modules.items():
        if path in planned:
            _write_factors(module, *planned[path])
        else:
            module.lora = None
    if had_none:
        freeze_other_parameters(model)
    return model


def _read(folder: Path) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, tuple[int, int]]]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"goldsmith.hf.load_adapter: {folder} has no {name}, so it is not the folder of a peft adapter"
            )
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: not JSON: {error}") from error
    _check_config(folder / CONFIG, config)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; experts support only 'LORA'")
    for key in REFUSED:
        if config.get(key):
            raise ValueError(f"{folder / CONFIG}: {key} is set, which neither peft nor goldsmith supports for experts")
    if not keeps_base_weights(config.get("init_lora_weights")):
        how = config["init_lora_weights"]
        raise ValueError(
            f"{folder / CONFIG}: init_lora_weights is {how!r}, which changes the base weights; "
            "peft does not support that together with experts"
        )
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS}: not a whole safetensors file: {error}") from error
    return config, tensors, _ranks(folder / WEIGHTS, metadata.get(RANKS, "{}"))


def _check_config(path: Path, config: object) -> None:
    """Raises ValueError if this is not a valid peft config, naming the key and its value."""
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, wanted a JSON object with peft's keys")
    for key, least in (("r", 1), ("lora_alpha", -math.inf)):
        if config.get("peft_type") == "LORA" and not _number(config.get(key), least):
            raise ValueError(f"{path}: {key} is {config.get(key)!r}, wanted a number{' above 0' * (key == 'r')}")
    for key, least in (("rank_pattern", 1), ("alpha_pattern", -math.inf)):
        value = config.get(key) or {}
        if not isinstance(value, dict) or not all(_number(number, least) for number in value.values()):
            raise ValueError(f"{path}: {key} is {value!r}, wanted a number for each name")
        for name in value:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"{path}: {key} has the invalid pattern {name!r}: {error}") from error
    for key in ("target_parameters", "modules_to_save"):
        value = config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{path}: {key} is {value!r}, wanted a list of names")


def _number(value: object, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= least


def _ranks(path: Path, text: str) -> dict[str, tuple[int, int]]:
    """(rank of gate, rank of up) by layer, from the file's metadata."""
    try:
        return {name: (int(gate), int(up)) for name, (gate, up) in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the metadata entry {RANKS} is damaged: {text!r:.80}") from error


def _factors_in_file(
    folder: Path,
    config: AdapterConfig,
    tensors: dict[str, Tensor],
    where: str,
    module: ConvertedExperts,
    used: set[str],
    missing: list[str],
) -> dict[str, PeftFactors]:
    """The file's LoRA for the experts at `where`, by parameter; tensors that the file lacks are added to `missing`.

    With two parameters peft nests its wrappers: gate_up_proj is the inner one.
    """
    outer, inner = f"{ROOT}{where}.", f"{ROOT}{where}.base_layer."
    covered = targeted(config, where)
    stems = dict(zip(covered, (inner, outer))) if len(covered) == 2 else dict.fromkeys(covered, outer)
    spec, by_parameter = module.spec, {}
    for name, stem in stems.items():
        pair = [f"{stem}lora_{which}.weight" for which in "AB"]
        if not any(tensor in tensors for tensor in pair):
            missing += pair
            continue
        inputs, outputs = (
            (spec.hidden_size, 2 * spec.intermediate_size)
            if name == GATE_UP
            else (spec.intermediate_size, spec.hidden_size)
        )
        a, b = (tensors.get(f"{stem}lora_{which}.weight") for which in "AB")
        if a is None or b is None:
            raise ValueError(
                f"{folder / WEIGHTS}: {stem}lora_A.weight and lora_B.weight belong together, but one is missing"
            )
        r = (a.shape[0] if a.dim() else 0) // spec.num_experts
        wanted = ([r * spec.num_experts, inputs], [outputs, r * spec.num_experts])
        if [list(a.shape), list(b.shape)] != list(wanted):
            raise ValueError(
                f"{folder / WEIGHTS}: {stem}lora_A.weight {list(a.shape)} and lora_B.weight {list(b.shape)} are for "
                f"other experts; wanted [r*{spec.num_experts}, {inputs}] and [{outputs}, r*{spec.num_experts}]"
            )
        rank_in_config = pattern_value(config, "rank_pattern", f"{where}.{name}", config["r"])
        if r != rank_in_config:
            raise ValueError(
                f"{folder / WEIGHTS}: {stem}lora_A.weight {list(a.shape)} has rank {r} with {spec.num_experts} "
                f"experts, but {CONFIG} says rank {rank_in_config}; the adapter may be for another number of experts"
            )
        for which, t in (("A", a), ("B", b)):
            if not t.is_floating_point() or not t.isfinite().all():
                problem = "NaN or Inf in it" if t.is_floating_point() else f"the dtype {str(t.dtype)[6:]}"
                raise ValueError(f"{folder / WEIGHTS}: {stem}lora_{which}.weight has {problem}; wanted finite floats")
        used |= {f"{stem}lora_A.weight", f"{stem}lora_B.weight"}
        by_parameter[name] = PeftFactors(
            *layout.from_peft(a, b, spec.num_experts), _scaling(config, f"{where}.{name}", r)
        )
    return by_parameter


def _scaling(config: AdapterConfig, name: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    alpha = pattern_value(config, "alpha_pattern", name, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _factors(
    module: ConvertedExperts, by_parameter: dict[str, PeftFactors], ranks: tuple[int, int] | None
) -> tuple[dict[str, Pair], dict[str, float], bool]:
    factors: dict[str, Pair] = {}
    scaling: dict[str, float] = {}
    if GATE_UP in by_parameter:
        factors |= layout.split(by_parameter[GATE_UP], ranks, interleaved=module.spec.interleaved)
        scaling |= {name: by_parameter[GATE_UP].scaling for name in factors}
    shared = "gate" in factors and "up" in factors and factors["gate"][0] is factors["up"][0]
    if DOWN in by_parameter:
        factors["down"] = (by_parameter[DOWN].a, by_parameter[DOWN].b)
        scaling["down"] = by_parameter[DOWN].scaling
    return factors, scaling, shared


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
        raise ValueError("goldsmith.hf.load_adapter: no LoRA to write into")
    with torch.no_grad():
        for name, (a, b) in factors.items():
            ours = old.factors()[name]
            ours[0].copy_(a)
            ours[1].copy_(b)
