"""save_pretrained of a converted model: a folder that transformers loads as the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..experts import PackedExperts
from ..offload.memory.transport import free_memory
from .adapter.saving import save_adapter
from .converted_experts import ConvertedExperts, converted_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_saveable(model: nn.Module) -> None:
    """Gives a converted transformers model a `save_pretrained` that includes its experts."""
    cast("Any", model).save_pretrained = MethodType(_save_model, model)


def _save_model(
    self: PreTrainedModel, save_directory: str | Path, *, state_dict: Mapping[str, Tensor] | None = None, **options: Any
) -> None:
    """transformers' `save_pretrained`, with the packed experts as plain weights, and a LoRA on them as an adapter.

    Codes are written as the numbers they stand for, in the model's dtype where it holds them exactly, otherwise in
    float32. A trained LoRA goes into adapter_model.safetensors in the same folder: `from_pretrained` applies it. Raises
    MemoryError, with nothing written, if the plain experts do not fit into memory.
    """
    modules = converted_modules(self)
    _check_memory(modules)
    state = dict(self.state_dict() if state_dict is None else state_dict)
    ours = tuple(f"{path}." for path in modules)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(ours)}
    for path, module in modules.items():
        state |= {f"{path}.{name}": tensor for name, tensor in plain_experts(module, self.dtype).items()}
    type(self).save_pretrained(self, save_directory, state_dict=state, **options)
    if options.get("is_main_process", True) and any(_is_trained(module) for module in modules.values()):
        save_adapter(self, save_directory)


def plain_experts(module: ConvertedExperts, dtype: torch.dtype) -> dict[str, Tensor]:
    """The base of converted experts as the model's own parameters, by name, in `dtype` or in float32."""
    base, spec = module.base, module.spec
    if isinstance(base, PackedExperts):
        parts = spec.own_layout(*base.unpack(), base.gate_up_bias, base.down_bias)
    else:
        plain = [tensor.detach().cpu().float() for tensor in base if tensor is not None]
        biases = (plain[2], plain[3]) if len(plain) == 4 else (None, None)
        parts = spec.own_layout(plain[0], plain[1], *biases)
    return {name: _narrowest(tensor, dtype) for name, tensor in parts.items()}


def _narrowest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = tensor.to(dtype)
    return (narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor).contiguous()


def _is_trained(module: ConvertedExperts) -> bool:
    """Whether the LoRA changes anything: B starts as zeros."""
    return module.lora is not None and any(bool(b.detach().any()) for _, b in module.lora.factors().values())


def _check_memory(modules: Mapping[str, ConvertedExperts]) -> None:
    elements = sum(
        module.spec.num_experts * 3 * module.spec.intermediate_size * module.spec.hidden_size
        for module in modules.values()
    )
    wanted, free = 4 * elements, free_memory()
    if free is not None and wanted > free:
        raise MemoryError(
            f"save_pretrained: the experts as plain weights need {wanted / 2**30:.1f} GiB of memory, but "
            f"{free / 2**30:.1f} GiB are free; use goldsmith.hf.save_adapter to save what was trained"
        )
