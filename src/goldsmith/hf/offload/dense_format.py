"""The dense part of a model in a packed format: its linear layers become `experts.PackedLinear`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...core.shapes import check_choice, kind
from ...experts import PackedLinear
from ...experts.packed.formats import FORMATS
from ...experts.packed.matrix import MatrixLayout
from ...experts.packed.quantisation import fitting_group
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


def packers(
    model: PreTrainedModel, layers: Sequence[ExpertsLayer], dense_format: str
) -> dict[str, Callable[[nn.Module], None]]:
    """{path: function that packs this linear layer}, for layers that are packed while the model is loaded.

    A layer whose weight is tied to another one's is left to `pack_dense`, because transformers ties them afterwards.
    """
    if dense_format == EXACT:
        return {}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = {id(module): name for name, module in model.named_modules()}
    return {
        names[id(layer)]: functools.partial(_pack, parent, name, dense_format)
        for parent, name, layer in linear_layers(model, layers)
        if f"{names[id(layer)]}.weight" not in {*tied, *tied.values()}
    }


def _pack(parent: nn.Module, name: str, dense_format: str, layer: nn.Module) -> None:
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"offload: {name} is {kind(layer)}, expected a linear layer")
    group = layout_of(layer, dense_format).group_size
    with torch.no_grad():
        setattr(parent, name, PackedLinear.of(layer, format=dense_format, group_size=group))


def pack_dense(model: PreTrainedModel, layers: list[ExpertsLayer], dense_format: str) -> None:
    """Replaces the linear layers of the model, except its routers and experts, one at a time."""
    if dense_format == EXACT:
        return
    for parent, name in [place[:2] for place in linear_layers(model, layers)]:
        _pack(parent, name, dense_format, getattr(parent, name))
    return_freed_memory()  # 107 MiB of 168 for 8 layers of H 1024 and 32,768 words in bfloat16 (2026-11)


def layout_of(layer: nn.Linear, dense_format: str) -> MatrixLayout:
    """The layout that a linear layer is packed in."""
    group = fitting_group(FORMATS[dense_format], layer.in_features)
    return MatrixLayout.of(dense_format, layer.out_features, layer.in_features, group)


def linear_layers(model: nn.Module, layers: Sequence[ExpertsLayer]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of each linear layer that is packed."""
    experts = {id(one.module) for one in layers}
    for parent in model.modules():
        if id(parent) not in experts:
            for name, module in parent.named_children():
                if type(module) is nn.Linear and name not in ROUTERS:
                    yield parent, name, module
