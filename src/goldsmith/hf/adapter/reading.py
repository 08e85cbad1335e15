"""Reads peft's two files: the config and its checks, and the LoRA of each layer's experts; the model is not touched."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.json_values import parse_json
from ..experts_spec import ExpertsSpec
from . import layout
from .coverage import targeted
from .files import (
    CONFIG,
    DOWN,
    RANKS,
    REFUSED,
    ROOT,
    WEIGHTS,
    AdapterConfig,
    keeps_base_weights,
    pattern_value,
)
from .layout import Pair, PeftFactors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # those in which an adapter may be stored


def read_adapter(folder: Path, op: str) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, tuple[int, int]]]:
    """(config, tensors, (rank of gate, rank of up) by layer); ValueError for files that are not a valid adapter."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{op}: {folder} has no {name}, so it is not the folder of a peft adapter")
    try:
        config = parse_json((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
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
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or not tensor.isfinite().all():
            problem = "NaN or Inf in it" if tensor.dtype in DTYPES else f"the dtype {str(tensor.dtype)[6:]}"
            raise ValueError(f"{folder / WEIGHTS}: {name} has {problem}; expected finite floats of 16 bits or more")
    return config, tensors, _ranks(folder / WEIGHTS, metadata.get(RANKS, "{}"))


def _check_config(path: Path, config: object) -> None:
    """Raises ValueError if this is not a valid peft config, naming the key and its value."""
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, expected a JSON object with peft's keys")
    for key, least in (("r", 1), ("lora_alpha", -math.inf)):
        if config.get("peft_type") == "LORA" and not _number(config.get(key), least):
            raise ValueError(f"{path}: {key} is {config.get(key)!r}, expected a number{' above 0' * (key == 'r')}")
    for key, least in (("rank_pattern", 1), ("alpha_pattern", -math.inf)):
        value = config.get(key) or {}
        if not isinstance(value, dict) or not all(_number(number, least) for number in value.values()):
            raise ValueError(f"{path}: {key} is {value!r}, expected a number for each name")
        for name in value:
            _check_pattern(path, key, name)
    modules = config.get("target_modules")
    if isinstance(modules, str):
        _check_pattern(path, "target_modules", modules)
    elif modules is not None and not _are_names(modules):
        raise ValueError(f"{path}: target_modules is {modules!r}, expected a list of names or a pattern")
    for key in ("target_parameters", "modules_to_save"):
        value = config.get(key) or []
        if not _are_names(value):
            raise ValueError(f"{path}: {key} is {value!r}, expected a list of names")


def _check_pattern(path: Path, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{path}: {key} has the invalid pattern {pattern!r}: {error}") from error


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _number(value: object, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= least


def _ranks(path: Path, text: str) -> dict[str, tuple[int, int]]:
    """(rank of gate, rank of up) by layer, from the file's metadata."""
    try:
        return {name: (int(gate), int(up)) for name, (gate, up) in parse_json(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the metadata entry {RANKS} is damaged: {text!r:.80}") from error


def factors_in_file(
    folder: Path,
    config: AdapterConfig,
    tensors: dict[str, Tensor],
    where: str,
    spec: ExpertsSpec,
    used: set[str],
    missing: list[str],
) -> dict[str, PeftFactors]:
    """The file's LoRA for the experts at `where`, by parameter; tensors that the file lacks are added to `missing`.

    With two parameters peft nests its wrappers: gate_up_proj (without a gate: up_proj) is the inner one.
    """
    outer, inner = f"{ROOT}{where}.", f"{ROOT}{where}.base_layer."
    covered = targeted(config, where, spec.first)
    stems = dict(zip(covered, (inner, outer))) if len(covered) == 2 else dict.fromkeys(covered, outer)
    by_parameter: dict[str, PeftFactors] = {}
    for name, stem in stems.items():
        both = [f"{stem}lora_{which}.weight" for which in "AB"]
        if not any(tensor in tensors for tensor in both):
            missing += both
            continue
        inputs, outputs = (
            (spec.hidden_size, (1 + spec.gated) * spec.intermediate_size)
            if name == spec.first
            else (spec.intermediate_size, spec.hidden_size)
        )
        if spec.swapped_in_peft:
            inputs, outputs = outputs, inputs
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
                f"other experts; expected [r*{spec.num_experts}, {inputs}] and [{outputs}, r*{spec.num_experts}]"
            )
        rank_in_config = pattern_value(config, "rank_pattern", f"{where}.{name}", config["r"])
        if r != rank_in_config:
            raise ValueError(
                f"{folder / WEIGHTS}: {stem}lora_A.weight {list(a.shape)} has rank {r} with {spec.num_experts} "
                f"experts, but {CONFIG} says rank {rank_in_config}; the adapter may be for another number of experts"
            )
        used |= {f"{stem}lora_A.weight", f"{stem}lora_B.weight"}
        pair = layout.from_peft(a, b, spec.num_experts)
        pair = layout.swapped(pair) if spec.swapped_in_peft else pair
        by_parameter[name] = PeftFactors(*pair, _scaling(config, f"{where}.{name}", r))
    return by_parameter


def _scaling(config: AdapterConfig, name: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    alpha = pattern_value(config, "alpha_pattern", name, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def split_factors(
    spec: ExpertsSpec, by_parameter: dict[str, PeftFactors], ranks: tuple[int, int] | None
) -> tuple[dict[str, Pair], dict[str, float], bool]:
    """(factors by target, their scalings, whether gate and up share one A); `ranks` as in `layout.split`."""
    factors: dict[str, Pair] = {}
    scaling: dict[str, float] = {}
    if spec.first in by_parameter:
        first = by_parameter[spec.first]
        if spec.gated:
            factors |= layout.split(first, ranks, interleaved=spec.interleaved)
        else:
            factors["gate"] = (first.a, first.b)
        scaling |= {name: first.scaling for name in factors}
    shared = "gate" in factors and "up" in factors and factors["gate"][0] is factors["up"][0]
    if DOWN in by_parameter:
        factors["down"] = (by_parameter[DOWN].a, by_parameter[DOWN].b)
        scaling["down"] = by_parameter[DOWN].scaling
    return factors, scaling, shared
