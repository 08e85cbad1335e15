"""load_adapter: an adapter of peft's, read into the LoRA of converted experts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...experts import LoRA
from ..converted_experts import ConvertedExperts, converted_modules, freeze_the_rest
from ..model_types import base_of
from . import layout
from .coverage import check_beside, check_targets, lora_config, refuse_missing, saved_modules, shell, targeted
from .files import (
    CONFIG,
    DOWN,
    GATE_UP,
    RANKS,
    REFUSED,
    ROOT,
    SAVED,
    WEIGHTS,
    AdapterConfig,
    is_plain_start,
    pattern,
    stripped,
)
from .layout import Pair, PeftFactors
from .peft_layers import adapter_of, keep, put_in, restore, take_off


def load_adapter(model: nn.Module, directory: str | Path) -> nn.Module:
    """Reads an adapter of peft's into a converted model, its experts' part as `experts.LoRA`; returns the model.

    Any adapter with `target_parameters` on the experts, ours or stock peft's, on a router too. It takes the place of
    what the model has: afterwards the model computes what it would if this were its first adapter. A LoRA of the same
    ranks and scalings, of a dtype that holds the file's numbers, is written in place, so that an optimizer keeps its
    tensors; others are replaced (float32 is not rounded to bfloat16), and what this adapter does not cover is taken
    off: make the optimizer afterwards. What targets other modules (attention) is put in by peft itself, trainable.
    Weights under `modules_to_save` (a router) are written into the model's own, and those are back with the next
    adapter. A model converted without `lora` gets its first LoRA here, and all else is frozen, as `convert` does it.
    Raises ValueError for files that are not there, damaged, for another model, without tensors for something that their
    config covers, or with what the experts cannot take; and for a model that has several adapters of peft's, or one
    that is merged or no LoRA. The model is then as it was.
    """
    modules = converted_modules(model)
    if not modules:
        raise ValueError(
            "goldsmith.hf.load_adapter: no experts of this model are converted: goldsmith.hf.convert(model) first, or "
            "peft.PeftModel.from_pretrained for the plain model"
        )
    folder = Path(directory)
    before = adapter_of(model)
    config, tensors, ranks = _read(folder)
    check_targets(folder / CONFIG, config, model)
    planned: dict[str, tuple[dict[str, Pair], dict[str, float], bool]] = {}
    used: set[str] = set()
    missing: list[str] = []
    for path, module in modules.items():
        halves = _halves_of_file(folder, config, tensors, stripped(path), module, used, missing)
        if halves:
            planned[path] = _factors(module, halves, ranks.get(stripped(path)))
    rest = {name: t for name, t in tensors.items() if name not in used}
    strange = [name for name in rest if ".experts." in name]
    if strange or not planned:
        what = f"{strange[0]} has no place in this model" if strange else "it holds nothing for this model's experts"
        raise ValueError(f"{folder}: {what}; its target_parameters are {config.get('target_parameters')}")
    bare = shell(base_of(model))
    take_off(bare)
    saved = saved_modules(bare, folder / CONFIG, config, rest, missing)
    beside = {name: t for name, t in rest.items() if name not in saved}
    like = check_beside(bare, folder, config, beside, missing)
    refuse_missing(folder, missing)
    restore(model, bare)
    keep(model, bare, rest)
    if beside or before is not None:
        put_in(model, like, lora_config(config, bare), beside, before)
    with torch.no_grad():
        for name, tensor in saved.items():
            tensor.copy_(rest[name])
    if config.get("modules_to_save"):
        base_of(model).__dict__[SAVED] = config["modules_to_save"]
    had_none = all(module.lora is None for module in modules.values())
    for path, module in modules.items():
        if path in planned:
            _put(module, *planned[path])
        else:
            module.lora = None
    if had_none:
        freeze_the_rest(model)
    return model


def _read(folder: Path) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, tuple[int, int]]]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"goldsmith.hf.load_adapter: {folder} has no {name}: not the folder of a peft adapter")
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: not JSON: {error}") from error
    _check_config(folder / CONFIG, config)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; experts take 'LORA'")
    for key in REFUSED:
        if config.get(key):
            raise ValueError(f"{folder / CONFIG}: {key} is set, which neither peft nor goldsmith has for experts")
    if not is_plain_start(config.get("init_lora_weights")):
        how = config["init_lora_weights"]
        raise ValueError(
            f"{folder / CONFIG}: init_lora_weights is {how!r}, which changes the weights under a LoRA; "
            "peft cannot do that beside experts"
        )
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS}: not a whole safetensors file: {error}") from error
    return config, tensors, _ranks(folder / WEIGHTS, metadata.get(RANKS, "{}"))


def _check_config(path: Path, config: object) -> None:
    """ValueError for what is no peft config, with the key and what came."""
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, wanted an object of peft's keys")
    for key, least in (("r", 1), ("lora_alpha", -math.inf)):
        if config.get("peft_type") == "LORA" and not _number(config.get(key), least):
            raise ValueError(f"{path}: {key} is {config.get(key)!r}, wanted a number{' above 0' * (key == 'r')}")
    for key, least in (("rank_pattern", 1), ("alpha_pattern", -math.inf)):
        given = config.get(key) or {}
        if not isinstance(given, dict) or not all(_number(value, least) for value in given.values()):
            raise ValueError(f"{path}: {key} is {given!r}, wanted a number for each name")
        for name in given:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"{path}: {key} has the pattern {name!r}, which cannot be read: {error}") from error
    for key in ("target_parameters", "modules_to_save"):
        given = config.get(key) or []
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise ValueError(f"{path}: {key} is {given!r}, wanted a list of names")


def _number(value: object, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= least


def _ranks(path: Path, text: str) -> dict[str, tuple[int, int]]:
    """The ranks that gate and up had, from the file's metadata."""
    try:
        return {name: (int(gate), int(up)) for name, (gate, up) in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its metadata {RANKS} is damaged: {text!r:.80}") from error


def _halves_of_file(
    folder: Path,
    config: AdapterConfig,
    tensors: dict[str, Tensor],
    where: str,
    module: ConvertedExperts,
    used: set[str],
    missing: list[str],
) -> dict[str, PeftFactors]:
    """What the file has for the experts at `where`; the wrappers nest, gate_up_proj inside. What lacks: `missing`."""
    outer, inner = f"{ROOT}{where}.", f"{ROOT}{where}.base_layer."
    covered = targeted(config, where)
    found = dict(zip(covered, (inner, outer))) if len(covered) == 2 else dict.fromkeys(covered, outer)
    spec, halves = module.spec, {}
    for name, stem in found.items():
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
                f"{folder / WEIGHTS}: {stem}lora_A.weight and lora_B.weight belong together, and one is missing"
            )
        r = (a.shape[0] if a.dim() else 0) // spec.num_experts
        wanted = ([r * spec.num_experts, inputs], [outputs, r * spec.num_experts])
        if [list(a.shape), list(b.shape)] != list(wanted):
            raise ValueError(
                f"{folder / WEIGHTS}: {stem}lora_A.weight {list(a.shape)} and lora_B.weight {list(b.shape)} are for "
                f"other experts; wanted [r*{spec.num_experts}, {inputs}] and [{outputs}, r*{spec.num_experts}]"
            )
        said = pattern(config, "rank_pattern", f"{where}.{name}", config["r"])
        if r != said:
            raise ValueError(
                f"{folder / WEIGHTS}: {stem}lora_A.weight {list(a.shape)} has rank {r} with {spec.num_experts} "
                f"experts, and {CONFIG} says {said}: it is for another number of experts"
            )
        for which, t in (("A", a), ("B", b)):
            if not t.is_floating_point() or not t.isfinite().all():
                what = "NaN or Inf in it" if t.is_floating_point() else f"the dtype {str(t.dtype)[6:]}"
                raise ValueError(f"{folder / WEIGHTS}: {stem}lora_{which}.weight has {what}, wanted finite floats")
        used |= {f"{stem}lora_A.weight", f"{stem}lora_B.weight"}
        halves[name] = PeftFactors(*layout.from_peft(a, b, spec.num_experts), _scaling(config, f"{where}.{name}", r))
    return halves


def _scaling(config: AdapterConfig, name: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    alpha = pattern(config, "alpha_pattern", name, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _factors(
    module: ConvertedExperts, halves: dict[str, PeftFactors], ranks: tuple[int, int] | None
) -> tuple[dict[str, Pair], dict[str, float], bool]:
    factors: dict[str, Pair] = {}
    scaling: dict[str, float] = {}
    if GATE_UP in halves:
        factors |= layout.split(halves[GATE_UP], ranks, interleaved=module.spec.interleaved)
        scaling |= {name: halves[GATE_UP].scaling for name in factors}
    shared = "gate" in factors and "up" in factors and factors["gate"][0] is factors["up"][0]
    if DOWN in halves:
        factors["down"] = (halves[DOWN].a, halves[DOWN].b)
        scaling["down"] = halves[DOWN].scaling
    return factors, scaling, shared


def _put(module: ConvertedExperts, factors: dict[str, Pair], scaling: dict[str, float], shared: bool) -> None:
    """Into the LoRA that is there if it is of this kind; else a new one takes its place."""
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
            device=module.held[0].device,
        )
        module.lora = old.train(module.training)
    if old is None:
        raise ValueError("goldsmith.hf.load_adapter: no LoRA to write into")
    with torch.no_grad():
        for name, (a, b) in factors.items():
            ours = old.factors()[name]
            ours[0].copy_(a)
            ours[1].copy_(b)
