"""save_adapter: the experts' LoRA in peft's own files, adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...experts import LoRA
from ...experts.files import refuse_what_is_no_file, replacing
from ..converted_experts import ConvertedExperts, converted_modules
from ..model_types import base_of
from . import layout
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
    config_text,
    is_named,
    is_plain_start,
    parameters_beside,
    pattern,
    serialised,
    stripped,
)
from .layout import PeftFactors

if TYPE_CHECKING:
    from peft import LoraConfig


def save_adapter(model: nn.Module, directory: str | Path) -> None:
    """Writes the LoRA of `model`'s experts, and what peft has trained beside it, as one adapter of stock peft.

    peft's own `PeftModel.from_pretrained(plain_model, directory)` gives the same merged weights, in float32 bit for bit
    (where gate and up have different scalings: to a rounding). Dropout belongs to training and is written as 0, which
    is all that peft takes for experts. Files are replaced whole, never half written. Raises ValueError when no experts
    are converted or none has a LoRA, and where the LoRA beside them has what peft does not take together with experts
    (DoRA, a bias, PiSSA), with nothing written; OSError when the disk refuses, or when a folder or a device has the
    name of one.
    """
    modules = {path: m for path, m in converted_modules(model).items() if m.lora is not None}
    if not modules:
        raise ValueError(
            "goldsmith.hf.save_adapter: no experts of this model have a LoRA; convert it with lora={...} first"
        )
    tensors: dict[str, Tensor] = {}
    halves: dict[str, PeftFactors] = {}
    ranks: dict[str, tuple[int, int]] = {}
    for path, module in modules.items():
        where = stripped(path)
        for name, half in _halves(module, ranks, where).items():
            halves[f"{where}.{name}"] = half
            both = module.lora is not None and name == GATE_UP and DOWN in _targets(module)
            stem = f"{ROOT}{where}." + ("base_layer." if both else "")
            tensors[f"{stem}lora_A.weight"], tensors[f"{stem}lora_B.weight"] = layout.to_peft(half.a, half.b)
    beside, config = _of_peft(model)
    tensors |= beside | _whole(model, config)
    config = _config(config, halves, len(converted_modules(model)), alone=not beside)
    folder = Path(directory)
    for name in (WEIGHTS, CONFIG):
        refuse_what_is_no_file("goldsmith.hf.save_adapter", folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", RANKS: json.dumps(ranks)}
    for name, content in ((WEIGHTS, serialised(tensors, metadata)), (CONFIG, config_text(config).encode())):
        with replacing(folder / name) as file:
            file.write(content)


def _targets(module: ConvertedExperts) -> list[str]:
    """The parameters of the model that this LoRA adapts, in peft's words."""
    factors = {name for name, (a, _) in _lora(module).factors().items() if a.shape[1]}
    return [name for name, on in ((GATE_UP, factors & {"gate", "up"}), (DOWN, factors & {"down"})) if on]


def _lora(module: ConvertedExperts) -> LoRA:
    if module.lora is None:
        raise ValueError("goldsmith.hf: these experts have no LoRA")
    return module.lora


def _halves(module: ConvertedExperts, ranks: dict[str, tuple[int, int]], where: str) -> dict[str, PeftFactors]:
    lora, spec = _lora(module), module.spec
    factors = {name: (a.detach(), b.detach()) for name, (a, b) in lora.factors().items()}
    halves = {}
    joined = layout.join(
        factors, lora.scaling, spec.intermediate_size, interleaved=spec.interleaved, shared=lora.shared_a
    )
    if joined is not None:
        halves[GATE_UP] = joined
        if not lora.shared_a:
            gate, up = (factors[name][0].shape[1] if name in factors else 0 for name in ("gate", "up"))
            ranks[where] = (gate, up)
    if "down" in factors and factors["down"][0].shape[1]:
        halves[DOWN] = PeftFactors(*factors["down"], lora.scaling["down"])
    return halves


def _config(config: AdapterConfig, halves: dict[str, PeftFactors], layers: int, *, alone: bool) -> AdapterConfig:
    """adapter_config.json: peft's, with the experts' parameters, ranks and scalings in it.

    alone   peft has put in nothing beside the experts, so that the first of them says rank and alpha.
    Of patterns the first that matches counts. The experts' come first, so that none of peft's own reaches them, and
    they match nothing else.
    """
    short: dict[str, list[str]] = {}
    for name in halves:  # "mlp.experts.down_proj" says every layer
        short.setdefault(re.sub(r"^.*\.\d+\.", "", name), []).append(name)
    rslora = bool(config.get("use_rslora"))
    first = next(iter(halves.values()))
    if alone:
        config |= {"r": first.rank, "lora_alpha": _alpha(first, rslora)}
    targets = {target for name, full in short.items() for target in ([name] if len(full) == layers else full)}
    config["target_parameters"] = sorted(targets.union(config["target_parameters"]))
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, full in short.items():
        same = len(full) == layers and len({(halves[f].rank, halves[f].scaling) for f in full}) == 1
        for target, names in [(name, full)] if same else [(f, [f]) for f in full]:
            half = halves[names[0]]
            if any(pattern(config, "rank_pattern", f, config["r"]) != half.rank for f in names):
                ranks[target] = half.rank
            alpha = _alpha(half, rslora)
            if any(pattern(config, "alpha_pattern", f, config["lora_alpha"]) != alpha for f in names):
                alphas[target] = alpha
    for key, ours in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        config[key] = ours | {name: value for name, value in config[key].items() if name not in ours}
    return config


def _alpha(half: PeftFactors, rslora: bool) -> int | float:
    return _number(half.scaling * (math.sqrt(half.rank) if rslora else half.rank))


def _whole(model: nn.Module, config: AdapterConfig) -> dict[str, Tensor]:
    """Modules that an adapter brought whole (a router), and in the config their names."""
    base = base_of(model)
    names = tuple(base.__dict__.get(SAVED, ()))
    if not names:
        return {}
    config["modules_to_save"] = sorted({*names, *(config.get("modules_to_save") or ())})
    places = {path: module for path, module in base.named_modules() if path.endswith(names)}
    return {f"{ROOT}{path}.{name}": t for path, module in places.items() for name, t in module.state_dict().items()}


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def _of_peft(model: nn.Module) -> tuple[dict[str, Tensor], AdapterConfig]:
    """What peft trains in this model by itself, and its config; an empty config where there is none."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    existing = getattr(model, "peft_config", None) or {}
    if len(existing) > 1:
        raise ValueError(f"goldsmith.hf.save_adapter: the model has adapters {sorted(existing)}; one can be written")
    base = base_of(model)
    if not existing:
        config = LoraConfig(
            target_modules=[], base_model_name_or_path=getattr(base.config, "_name_or_path", None) or None
        )
        tensors: dict[str, Tensor] = {}
    else:
        ((name, config),) = existing.items()
        _check_peft_s(config)
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)  # "auto" asks the hub
        ours = tuple(f"{path}." for path in converted_modules(model))
        tensors = {f"{ROOT}{stripped(key)}": t for key, t in state.items() if not key.startswith(ours)}
    written = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    task = getattr(config.task_type, "value", config.task_type)
    if task is None and type(base).__name__.endswith("ForCausalLM"):
        task = "CAUSAL_LM"
    written |= {"peft_type": "LORA", "task_type": task, "lora_dropout": 0.0, "inference_mode": True}
    if isinstance(config.init_lora_weights, str):
        written["init_lora_weights"] = True  # the factors are in the file
    # a router, and what else is no module of peft's: without these names its tensors would be nobody's
    names = parameters_beside(model)
    written["target_parameters"] = [t for t in config.target_parameters or () if is_named(t, names)]
    written["rank_pattern"], written["alpha_pattern"] = (
        dict(config.rank_pattern or {}),
        dict(config.alpha_pattern or {}),
    )
    return tensors, written


def _check_peft_s(config: LoraConfig) -> None:
    """Raises ValueError for what peft does not take together with experts."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(
            f"goldsmith.hf.save_adapter: the adapter beside the experts is {kind}; only LoRA can be written with them"
        )
    for key in REFUSED:
        if getattr(config, key, None):
            raise ValueError(
                f"goldsmith.hf.save_adapter: the adapter beside the experts has {key}, which peft does not take "
                "together with experts in one adapter; nothing was written. Leave it out of its LoraConfig"
            )
    if not is_plain_start(config.init_lora_weights):
        raise ValueError(
            f"goldsmith.hf.save_adapter: init_lora_weights={config.init_lora_weights!r} of the adapter beside the "
            "experts has changed the weights under it, which peft cannot do again beside experts; nothing was written"
        )
