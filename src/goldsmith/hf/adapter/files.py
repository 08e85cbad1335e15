"""The names in peft's two adapter files, and their text: what reading and writing share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from safetensors.torch import save
from torch import Tensor, nn

from ..converted_experts import converted_modules
from ..model_types import base_of

if TYPE_CHECKING:
    pass

AdapterConfig = dict[str, Any]  # adapter_config.json: the fields of peft's LoraConfig
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


ROOT = "base_model.model."


GATE_UP, DOWN = "gate_up_proj", "down_proj"


SAVED = "_goldsmith_saved"  # in the model's __dict__: modules that an adapter brought whole, by the ends of their names


# of a LoraConfig: what peft does not take for parameters
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


RANKS = "goldsmith.ranks"  # metadata of the weights' file: the ranks that gate and up had before they became one pair


def config_text(config: Mapping[str, object]) -> str:
    """The text of adapter_config.json: keys in order, but those of patterns, of which the first that matches counts."""
    return json.dumps(dict(sorted(config.items())), indent=2) + "\n"


def serialised(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file, the same for the same tensors: the package itself orders metadata by chance."""
    blob = save({name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}, dict(metadata))
    end = 8 + int.from_bytes(blob[:8], "little")
    header = json.dumps(json.loads(blob[8:end]), separators=(",", ":"), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + blob[end:]


def is_plain_start(how: object) -> bool:
    """Whether `init_lora_weights` leaves the weights under the LoRA alone; PiSSA, OLoRA and others take from them."""
    return not isinstance(how, str) or how.lower() in ("gaussian", "eva", "orthogonal")


def stripped(path: str) -> str:
    """The path in the plain model: without peft's own wrapping."""
    return path.removeprefix(ROOT)


def parameters_beside(model: nn.Module) -> list[str]:
    """Names of all parameters that are not the experts', as they are in the plain model, which peft has not wrapped."""
    base = base_of(model)
    ours = tuple(f"{path}." for path in converted_modules(base))
    names = (name for name, _ in base.named_parameters(remove_duplicate=False) if ".lora_" not in name)
    return [name.replace(".base_layer.", ".") for name in names if not name.startswith(ours)]


def is_named(target: str, names: Iterable[str]) -> bool:
    """Whether one of `target_parameters` reaches any of these parameters, by peft's rule."""
    return any(f".{name}".endswith(f".{target}") for name in names)


def pattern(config: AdapterConfig, key: str, name: str, otherwise: float) -> float:
    """A value by peft's rule for patterns: that of the first which matches the end of the name."""
    given = config.get(key) or {}
    return next((v for known, v in given.items() if re.match(rf"(.*\.)?({known})$", name)), otherwise)
