"""Names of an adapter's tensors under which stock peft finds them again.

When peft loads an adapter, it applies transformers' renamings for the model's checkpoints to the names in the file,
even to names that are right already. In some models (deepseek_ocr2, mistral_large4) the new name matches no module, and
peft only warns. Such a tensor gets a name in the file that these renamings turn into the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import nn

from ..model_types import base_of

Value = TypeVar("Value")


def names_in_file(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """{name in the model: its name in the file}. Raises ValueError if no name in a file leads to it."""
    chosen = {name: name for name in names}
    arrived = _as_peft_renames(model, chosen)
    for name in chosen:
        if arrived[name] == name:
            continue
        parts = name.split(".")
        shorter = [".".join(parts[:k] + parts[k + 1 :]) for k in range(3, len(parts) - 2)]
        renamed = _as_peft_renames(model, shorter)
        fitting = [other for other in shorter if renamed[other] == name]
        if not fitting:
            raise ValueError(
                f"goldsmith.hf.save_adapter: stock peft would rename {name} to {arrived[name]} when it loads the "
                f"adapter into {type(base_of(model)).__name__}, which has no such module; nothing was written"
            )
        chosen[name] = fitting[0]
    return chosen


def by_names_in_model(model: nn.Module, tensors: Mapping[str, Value], root: str) -> dict[str, Value]:
    """The tensors of a file by the model's names: a name whose module the model lacks is renamed as peft does."""
    modules = {path for path, _ in base_of(model).named_modules()}
    unknown = [name for name in tensors if _module(name, root) not in modules]
    renamed = _as_peft_renames(model, unknown)
    return {renamed.get(name, name): value for name, value in tensors.items()}


def _module(name: str, root: str) -> str:
    return name.removeprefix(root).partition(".lora_")[0].replace(".base_layer", "")


def _as_peft_renames(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """{name: what peft makes of it}, for names of LoRA factors; the others stay."""
    names = [name for name in names if ".lora_" in name]
    same = {name: name for name in names}
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:  # an older peft renames nothing
        return _Renamed(same)
    from peft import LoraConfig

    base, config = base_of(model), LoraConfig()
    for name in names:  # one by one, because the result does not say where a tensor came from
        try:
            result = convert_peft_adapter_state_dict_for_transformers(base, config, {name: torch.zeros(1, 1)})
        except ValueError:  # a factor of one expert, which peft joins with others: `fused` has done so where it can
            continue
        if len(result) == 1:
            same[name] = next(iter(result)).replace(".default.", ".")
    return _Renamed(same)


class _Renamed(dict[str, str]):
    """A dict that maps every other name to itself."""

    def __missing__(self, name: str) -> str:
        return name
