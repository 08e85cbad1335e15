"""Rotary embeddings whose angles depend on the length of the sequence so far, not only on a token's position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BORDER = "original_max_position_embeddings"


def length_types(model: PreTrainedModel) -> list[str]:
    """The types of the model's rotary embeddings that depend on the length."""
    return sorted({kind for rotary in _rotaries(model) for kind in _types(rotary).values() if _by_length(kind)})


def lengths_forgotten(model: PreTrainedModel) -> list[RemovableHandle]:
    """Hooks with which every call of such an embedding computes as if it were the first.

    The type `dynamic` of transformers keeps the frequencies of the longest sequence so far for the next sequence.
    """
    rotaries = [rotary for rotary in _rotaries(model) if any(map(_by_length, _types(rotary).values()))]
    return [rotary.register_forward_pre_hook(_forget) for rotary in rotaries]


def recomputed_at(model: PreTrainedModel) -> int | None:
    """The length at which `generate` computes a whole text again, in the classes of transformers that do so.

    All keys of a longer text have other angles. Phi3 and PhiMoE, for example, then drop the cache.
    """
    code = getattr(getattr(type(model), "prepare_inputs_for_generation", None), "__code__", None)
    most: int | None = getattr(model.config, BORDER, None)
    return most + 1 if code is not None and BORDER in code.co_names and most is not None else None


def _by_length(kind: str) -> bool:
    """As in transformers' dynamic_rope_update."""
    return "dynamic" in kind or kind == "longrope"


def _rotaries(model: nn.Module) -> Iterable[nn.Module]:
    return (module for module in model.modules() if isinstance(getattr(module, "rope_type", None), (str, dict)))


def _types(rotary: Any) -> dict[str, str]:
    """{beginning of the names of its buffers: type}; with several kinds of layers there is one of each"""
    types: str | dict[str, str] = rotary.rope_type
    return {"": types} if isinstance(types, str) else {f"{layer}_": kind for layer, kind in types.items()}


def _forget(rotary: Any, inputs: object) -> None:
    """Sets `dynamic` frequencies to those of short sequences; `longrope` chooses its own in every call."""
    for begin, kind in _types(rotary).items():
        if "dynamic" in kind:
            original = getattr(rotary, f"{begin}original_inv_freq")
            device = getattr(rotary, f"{begin}inv_freq").device
            rotary.register_buffer(f"{begin}inv_freq", original.to(device), persistent=False)
            setattr(rotary, f"{begin}max_seq_len_cached", rotary.original_max_seq_len)
