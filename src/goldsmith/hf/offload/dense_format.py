"""The dense part of a model in a packed format: its linear layers become `experts.PackedLinear`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...core.shapes import check_choice
from ...experts import PackedLinear
from ...experts.packed.formats import FORMATS
from ...offload.memory.host_memory import return_freed_memory
from .adapters import AdapterArgument
from .layers import ExpertsLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXACT = "exact"
CHOICES = (EXACT, *FORMATS)
ROUTERS = (
    "gate",
    "router",
    "shared_expert_gate",
)  # their scores choose experts: an error there changes more than a sum


def check_dense_format(dense_format: str, device: torch.device, adapter: AdapterArgument) -> None:
    """Raises ValueError for an unknown format, and where packed dense layers cannot be used."""
    check_choice("offload", "dense_format", dense_format, CHOICES)
    if dense_format == EXACT:
        return
    if device.type != "cpu":
        raise ValueError(
            f'offload: dense_format="{dense_format}" is for device="cpu": on {device} the dense part keeps its own '
            'weights; pass dense_format="exact"'
        )
    if adapter is not None:
        raise ValueError(
            f'offload: dense_format="{dense_format}" leaves no layers for an adapter: pass dense_format="exact", '
            "or merge the adapter first (goldsmith merge)"
        )


def pack_dense(model: PreTrainedModel, layers: list[ExpertsLayer], dense_format: str) -> None:
    """Replaces the linear layers of the model, except its routers and experts, one at a time."""
    if dense_format == EXACT:
        return
    with torch.no_grad():
        for parent, name, layer in list(linear_layers(model, layers)):
            setattr(parent, name, PackedLinear.of(layer, format=dense_format))
            del layer
    return_freed_memory()  # 107 MiB of 168 for 8 layers of H 1024 and 32,768 words in bfloat16 (2026-11)


def linear_layers(model: nn.Module, layers: Sequence[ExpertsLayer]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of each linear layer that is packed."""
    experts = {id(one.module) for one in layers}
    for parent in model.modules():
        if id(parent) not in experts:
            for name, module in parent.named_children():
                if type(module) is nn.Linear and name not in ROUTERS:
                    yield parent, name, module
