"""gpu_budget="auto": what is free on the device once the model's other parts are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
RESERVE, SHARE = GIB, 0.05  # left free: the larger of the two; fragments, activations, cuBLAS's workspaces
TOKENS = 4096  # of the KV cache, where the model does not say how long its texts may be


def dense_bytes(model: nn.Module) -> int:
    """Bytes of what is no expert: all that is not on the meta device, and no experts module's."""
    from ..experts_spec import is_experts

    found = {}
    for module in model.modules():
        if not is_experts(module):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    found[id(tensor)] = tensor.nbytes
    return sum(found.values())


def cache_bytes(model: PreTrainedModel, tokens: int | None = None, rows: int = 1) -> int:
    """What keys and values of so many rows take at most

    tokens=None: the generation config's max_length, or 4096, and at most what the model was made for.
    """
    text = model.config.get_text_config()
    if tokens is None:
        generation = getattr(model, "generation_config", None)
        asked = getattr(generation, "max_length", None)
        most = getattr(text, "max_position_embeddings", None) or TOKENS
        tokens = min(asked if asked and asked > 20 else TOKENS, most)  # 20 is transformers' own word for "not said"
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    both = 2 * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    if getattr(text, "kv_lora_rank", None):  # latent attention: some versions of transformers keep every head's
        heads, both = text.num_attention_heads, text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    return rows * text.num_hidden_layers * heads * both * tokens * model.dtype.itemsize


def check_fits(model: nn.Module, device: torch.device) -> None:
    """ValueError when the parts that are no experts have no room on the device."""
    if device.type != "cuda":
        return
    free, needed = torch.cuda.mem_get_info(device)[0], dense_bytes(model)
    if needed > free:
        raise ValueError(
            f"offload: what is no expert takes {needed / GIB:.1f} GiB (attention, embeddings, dense layers), and "
            f'{device} has {free / GIB:.1f} GiB free: give device="cpu", or a GPU with more memory'
        )


def automatic(model: PreTrainedModel, device: torch.device, rows: int = 1, tokens: int | None = None) -> int:
    """Free memory, less the KV cache of so many rows, less the larger of 1 GiB and 5 %; 0 where nothing is left."""
    torch.cuda.empty_cache()
    free, all_of_it = torch.cuda.mem_get_info(device)
    return max(0, int(free - cache_bytes(model, tokens, rows) - max(RESERVE, SHARE * all_of_it)))
