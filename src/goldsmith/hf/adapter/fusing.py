"""Adapters with one pair of factors per expert and projection, brought into the layout for fused experts.

peft wrote such adapters with transformers 4, whose experts were separate modules; `goldsmith adapter export` writes
them for vLLM and SGLang. peft itself fuses them when it loads one, and this module calls peft's own functions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..checkpoint.foreign_errors import explained
from ..model_types import base_of
from .files import WEIGHTS, AdapterConfig

ONE_EXPERT = re.compile(r"\.experts\.\d+\.[^.]+\.lora_[AB]\.weight$")


def fused(
    model: nn.Module, folder: Path, config: AdapterConfig, tensors: dict[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """(config, tensors) with one pair per parameter of the model; unchanged if no pair belongs to one expert.

    Raises ValueError for a model into whose layout peft cannot bring it, and for incomplete factors.
    """
    single = [name for name in tensors if ONE_EXPERT.search(name)]
    if not single:
        return config, tensors
    subject = f"{folder / WEIGHTS}: its pairs for single experts cannot be joined for this model"
    with explained(subject):
        changed, arrived = _as_peft_joins(base_of(model), config, tensors)
    left = [name for name in single if name in arrived]
    if left:
        raise ValueError(
            f"{subject}: peft does not know how to join {left[0]} and its like for {type(base_of(model)).__name__}"
        )
    return changed, arrived


def _as_peft_joins(
    base: nn.Module, config: AdapterConfig, tensors: dict[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
        convert_peft_config_for_transformers,
    )

    lora: Any = LoraConfig(**{key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__})
    convert_peft_config_for_transformers(lora, base, conversions=None)
    arrived = convert_peft_adapter_state_dict_for_transformers(base, lora, dict(tensors))
    lists = {name: sorted(getattr(lora, name) or ()) for name in ("target_modules", "target_parameters")}
    patterns = {name: dict(getattr(lora, name)) for name in ("rank_pattern", "alpha_pattern")}
    return {**config, **lists, **patterns}, arrived
