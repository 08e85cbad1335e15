"""save_adapter: writes the experts' LoRA to peft's files, adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...experts import LoRA
from ...experts.packed.files import refuse_what_is_no_file, replacing
from ..converted_experts import ConvertedExperts, converted_modules
from ..model_types import base_of
from . import layout
from .files import (
    CONFIG,
    DOWN,
    RANKS,
    REFUSED,
    ROOT,
    WEIGHTS,
    WHOLE_MODULES,
    AdapterConfig,
    config_text,
    keeps_base_weights,
    matches_target,
    other_parameters,
    pattern_value,
    plain_path,
    serialised,
)
from .layout import PeftFactors
from .peft_names import names_in_file

if TYPE_CHECKING:
    from peft import LoraConfig


def save_adapter(model: nn.Module, directory: str | Path) -> None:
    """Writes the experts' LoRA, and everything else that peft has trained in the model, as one stock peft adapter.

    `PeftModel.from_pretrained(plain_model, directory)` then computes the same merged weights, in float32 bit for bit
    (up to rounding if gate and up have different scalings). Dropout only matters in training and is written as 0, the
    only value that peft supports for experts. Each file is replaced atomically.

    Raises ValueError, with nothing written, if no experts are converted, none has a LoRA, or peft's own LoRA uses an
    option that peft does not support together with experts (DoRA, a bias, PiSSA). Raises OSError if writing fails or
    if a folder or device already has one of the file names.
    """
    modules = {path: m for path, m in converted_modules(model).items() if m.lora is not None}
    if not modules:
        raise ValueError(
            "goldsmith.hf.save_adapter: no experts of this model have a LoRA; convert it with lora={...} first"
        )
    tensors: dict[str, Tensor] = {}
    by_parameter: dict[str, PeftFactors] = {}
    ranks: dict[str, tuple[int, int]] = {}
    for path, module in modules.items():
        where = plain_path(path)
        for name, factors in _factors_to_save(module, ranks, where).items():
            by_parameter[f"{where}.{name}"] = factors
            both = name == module.spec.first and DOWN in _targets(module)
            stem = f"{ROOT}{where}." + ("base_layer." if both else "")
            pair = (factors.a, factors.b)
            pair = layout.swapped(pair) if module.spec.swapped_in_peft else pair
            tensors[f"{stem}lora_A.weight"], tensors[f"{stem}lora_B.weight"] = layout.to_peft(*pair)
    peft_tensors, config = _peft_part(model)
    tensors |= peft_tensors | _whole_modules(model, config)
    config = _config(config, by_parameter, len(converted_modules(model)), alone=not peft_tensors)
    names = names_in_file(model, tensors)
    tensors = {names[name]: tensor for name, tensor in tensors.items()}
    folder = Path(directory)
    for name in (WEIGHTS, CONFIG):
        refuse_what_is_no_file("goldsmith.hf.save_adapter", folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", RANKS: json.dumps(ranks)}
    for name, content in ((WEIGHTS, serialised(tensors, metadata)), (CONFIG, config_text(config).encode())):
        with replacing(folder / name) as file:
            file.write(content)


def _targets(module: ConvertedExperts) -> list[str]:
    """The parameters that this LoRA adapts, by peft's names."""
    factors = {name for name, (a, _) in _lora(module).factors().items() if a.shape[1]}
    return [name for name, on in ((module.spec.first, factors & {"gate", "up"}), (DOWN, factors & {"down"})) if on]


def _lora(module: ConvertedExperts) -> LoRA:
    if module.lora is None:
        raise ValueError("goldsmith.hf: these experts have no LoRA")
    return module.lora


def _factors_to_save(module: ConvertedExperts, ranks: dict[str, tuple[int, int]], where: str) -> dict[str, PeftFactors]:
    """The module's LoRA by peft's parameters; adds the separate ranks of gate and up to `ranks`."""
    lora, spec = _lora(module), module.spec
    factors = {name: (a.detach(), b.detach()) for name, (a, b) in lora.factors().items()}
    by_parameter = {}
    if not spec.gated:
        if "gate" in factors and factors["gate"][0].shape[1]:
            by_parameter[spec.first] = PeftFactors(*factors["gate"], lora.scaling["gate"])
        if "down" in factors and factors["down"][0].shape[1]:
            by_parameter[DOWN] = PeftFactors(*factors["down"], lora.scaling["down"])
        return by_parameter
    joined = layout.join(
        factors, lora.scaling, spec.intermediate_size, interleaved=spec.interleaved, shared=lora.shared_a
    )
    if joined is not None:
        by_parameter[spec.first] = joined
        if not lora.shared_a:
            gate, up = (factors[name][0].shape[1] if name in factors else 0 for name in ("gate", "up"))
            ranks[where] = (gate, up)
    if "down" in factors and factors["down"][0].shape[1]:
        by_parameter[DOWN] = PeftFactors(*factors["down"], lora.scaling["down"])
    return by_parameter


def _config(config: AdapterConfig, by_parameter: dict[str, PeftFactors], layers: int, *, alone: bool) -> AdapterConfig:
    """adapter_config.json: peft's config plus the experts' parameters, ranks and scalings.

    alone   peft has adapted nothing else, so r and lora_alpha come from the experts.
    peft uses the first pattern that matches a name. The experts' patterns come first, so that no other pattern
    applies to experts; they match nothing else.
    """
    short: dict[str, list[str]] = {}
    for name in by_parameter:  # "mlp.experts.down_proj" stands for every layer
        short.setdefault(re.sub(r"^.*\.\d+\.", "", name), []).append(name)
    rslora = bool(config.get("use_rslora"))
    first = next(iter(by_parameter.values()))
    if alone:
        config |= {"r": first.rank, "lora_alpha": _alpha(first, rslora)}
    targets = {target for name, full in short.items() for target in ([name] if len(full) == layers else full)}
    config["target_parameters"] = sorted(targets.union(config["target_parameters"]))
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, full in short.items():
        same = len(full) == layers and len({(by_parameter[f].rank, by_parameter[f].scaling) for f in full}) == 1
        for target, names in [(name, full)] if same else [(f, [f]) for f in full]:
            factors = by_parameter[names[0]]
            if any(pattern_value(config, "rank_pattern", f, config["r"]) != factors.rank for f in names):
                ranks[target] = factors.rank
            alpha = _alpha(factors, rslora)
            if any(pattern_value(config, "alpha_pattern", f, config["lora_alpha"]) != alpha for f in names):
                alphas[target] = alpha
    for key, ours in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        config[key] = ours | {name: value for name, value in config[key].items() if name not in ours}
    return config


def _alpha(factors: PeftFactors, rslora: bool) -> int | float:
    return _number(factors.scaling * (math.sqrt(factors.rank) if rslora else factors.rank))


def _whole_modules(model: nn.Module, config: AdapterConfig) -> dict[str, Tensor]:
    """Tensors of the modules that the loaded adapter replaced whole (a router); adds their names to the config."""
    base = base_of(model)
    names = tuple(base.__dict__.get(WHOLE_MODULES, ()))
    if not names:
        return {}
    config["modules_to_save"] = sorted({*names, *(config.get("modules_to_save") or ())})
    places = {path: module for path, module in base.named_modules() if path.endswith(names)}
    return {f"{ROOT}{path}.{name}": t for path, module in places.items() for name, t in module.state_dict().items()}


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def _peft_part(model: nn.Module) -> tuple[dict[str, Tensor], AdapterConfig]:
    """The tensors that peft itself trains in this model, and its config; a new config if the model has none."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    adapters = getattr(model, "peft_config", None) or {}
    if len(adapters) > 1:
        raise ValueError(f"goldsmith.hf.save_adapter: the model has adapters {sorted(adapters)}; only one can be saved")
    base = base_of(model)
    if not adapters:
        config = LoraConfig(
            target_modules=[], base_model_name_or_path=getattr(base.config, "_name_or_path", None) or None
        )
        tensors: dict[str, Tensor] = {}
    else:
        ((name, config),) = adapters.items()
        _check_peft_config(config)
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)  # "auto" asks the hub
        ours = tuple(f"{path}." for path in converted_modules(model))
        tensors = {f"{ROOT}{plain_path(key)}": t for key, t in state.items() if not key.startswith(ours)}
    fields = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    task = getattr(config.task_type, "value", config.task_type)
    if task is None and type(base).__name__.endswith("ForCausalLM"):
        task = "CAUSAL_LM"
    fields |= {"peft_type": "LORA", "task_type": task, "lora_dropout": 0.0, "inference_mode": True}
    if isinstance(config.init_lora_weights, str):
        fields["init_lora_weights"] = True  # the factors are in the file
    # LoRA on parameters outside the experts (a router): peft needs their names to find their tensors again
    names = other_parameters(model)
    fields["target_parameters"] = [t for t in config.target_parameters or () if matches_target(t, names)]
    fields["rank_pattern"], fields["alpha_pattern"] = (
        dict(config.rank_pattern or {}),
        dict(config.alpha_pattern or {}),
    )
    return tensors, fields


def _check_peft_config(config: LoraConfig) -> None:
    """Raises ValueError for options that peft does not support together with experts."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(
            f"goldsmith.hf.save_adapter: the adapter outside the experts is {kind}; only LoRA can be saved with them"
        )
    for key in REFUSED:
        if getattr(config, key, None):
            raise ValueError(
                f"goldsmith.hf.save_adapter: the adapter outside the experts has {key}, which peft does not support "
                "together with experts in one adapter; nothing was written. Remove it from its LoraConfig"
            )
    if not keeps_base_weights(config.init_lora_weights):
        raise ValueError(
            f"goldsmith.hf.save_adapter: init_lora_weights={config.init_lora_weights!r} of the adapter outside the "
            "experts has changed the base weights, which peft cannot repeat together with experts; nothing was written"
        )
