"""peft's two adapter files, adapter_config.json and adapter_model.safetensors: names in them and their bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from ...core.json_values import parse_json
from ..converted_experts import converted_modules
from ..experts_spec import experts_modules
from ..model_types import base_of

AdapterConfig = dict[str, Any]  # adapter_config.json: the fields of peft's LoraConfig
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ROOT = "base_model.model."  # the prefix of every tensor's name in the file
GATE_UP, DOWN = "gate_up_proj", "down_proj"
# key in the model's __dict__: the modules that the loaded adapter replaced whole, by the ends of their names
WHOLE_MODULES = "_goldsmith_saved"
# fields of a LoraConfig that peft does not support for parameters
REFUSED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "velora_config",
)
# key in the metadata of the weights file: the ranks of gate and up before they were joined into one pair
RANKS = "goldsmith.ranks"


def config_text(config: Mapping[str, object]) -> str:
    """The text of adapter_config.json, keys sorted; patterns keep their order, as the first match counts."""
    return json.dumps(dict(sorted(config.items())), indent=2) + "\n"


def serialised(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file, equal for equal tensors: safetensors itself writes metadata in random order."""
    blob = save({name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}, dict(metadata))
    end = 8 + int.from_bytes(blob[:8], "little")
    header = json.dumps(parse_json(blob[8:end]), separators=(",", ":"), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + blob[end:]


def keeps_base_weights(how: object) -> bool:
    """Whether `init_lora_weights` leaves the base weights unchanged; PiSSA, OLoRA and others subtract from them."""
    return not isinstance(how, str) or how.lower() in ("gaussian", "eva", "orthogonal")


def plain_path(path: str) -> str:
    """The path in the plain model, without the prefix that peft adds."""
    return path.removeprefix(ROOT)


def experts_paths(model: nn.Module) -> list[str]:
    """Paths of the model's experts: the converted ones, or those of a plain model, which an engine may compute."""
    return list(converted_modules(model)) or [path for path, _ in experts_modules(model)]


def other_parameters(model: nn.Module) -> list[str]:
    """Names of all parameters outside the experts, as the plain model has them before peft wraps it."""
    base = base_of(model)
    ours = tuple(f"{path}." for path in experts_paths(base))
    names = (name for name, _ in base.named_parameters(remove_duplicate=False) if ".lora_" not in name)
    return [name.replace(".base_layer.", ".") for name in names if not name.startswith(ours)]


def matches_target(target: str, names: Iterable[str]) -> bool:
    """Whether this entry of `target_parameters` matches any of these parameters, by peft's rule."""
    return any(f".{name}".endswith(f".{target}") for name in names)


def pattern_value(config: AdapterConfig, key: str, name: str, default: float) -> float:
    """The value of the first pattern that matches the end of the name (peft's rule), or `default`."""
    patterns = config.get(key) or {}
    return next((v for pattern, v in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), default)
