"""gpu_budget="auto": the GPU memory that is free once the model's other parts are on the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
RESERVE, SHARE = GIB, 0.05  # kept free, the larger of both: for fragmentation, activations and cuBLAS workspaces
TOKENS = 4096  # KV cache length for a model that does not state its maximum


def dense_bytes(model: nn.Module, packed: Collection[nn.Module] = ()) -> int:
    """Bytes of everything outside the experts and the weights of these layers."""
    from ..experts_spec import is_experts

    sizes = {}
    for module in model.modules():
        if not is_experts(module):
            left_out = any(module is one for one in packed)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and not (left_out and name == "weight"):
                    sizes[id(tensor)] = tensor.nbytes
    return sum(sizes.values())


def cache_bytes(model: PreTrainedModel, tokens: int | None = None, rows: int = 1) -> int:
    """An upper bound of the bytes of the KV cache for this many rows.

    tokens=None: the generation config's max_length, or 4096, but at most the model's max_position_embeddings.
    """
    text = model.config.get_text_config()
    if tokens is None:
        generation = getattr(model, "generation_config", None)
        max_length = getattr(generation, "max_length", None)
        max_positions = getattr(text, "max_position_embeddings", None) or TOKENS
        # transformers' default max_length is 20, which means that none was set
        tokens = min(max_length if max_length and max_length > 20 else TOKENS, max_positions)
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers  # Gemma 4: sizes by layer
    return rows * tokens * model.dtype.itemsize * sum(map(_numbers, layers))


def _numbers(layer: Any) -> int:
    """Numbers that one layer's cache holds for a token: its keys and values."""
    if getattr(layer, "kv_lora_rank", None):  # latent attention: some versions of transformers cache full heads
        return layer.num_attention_heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim)
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return 2 * heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def check_fits(model: nn.Module, device: torch.device) -> None:
    """Raises ValueError if the parts outside the experts do not fit on the device."""
    if device.type != "cuda":
        return
    free, needed = torch.cuda.mem_get_info(device)[0], dense_bytes(model)
    if needed > free:
        raise ValueError(
            f"offload: everything but the experts (attention, embeddings, dense layers) takes {needed / GIB:.1f} GiB, "
            f'but {device} has {free / GIB:.1f} GiB free: give device="cpu", or use a GPU with more memory'
        )


def automatic(model: PreTrainedModel, device: torch.device, rows: int = 1, tokens: int | None = None) -> int:
    """Free bytes, minus the KV cache of this many rows, minus the larger of 1 GiB and 5 % of the memory; at least 0."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - cache_bytes(model, tokens, rows) - max(RESERVE, SHARE * total)))
