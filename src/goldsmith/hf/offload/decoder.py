"""The description of a transformers model for a native step, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...experts import PackedLinear
from ...offload.decoding.model import DecoderLayer, DecoderModel, LinearLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Model classes whose layers are h += attention(norm(h)), h += experts(norm(h)) with RMSNorm, rotary embeddings and a
# softmax router; and whether their routing weights stay in float32.
FAMILIES = {"Qwen3MoeForCausalLM": False, "OlmoeForCausalLM": False, "MixtralForCausalLM": True}
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length of the text
ATTENTION = ("sdpa", "eager")
MULTIPLE = 16  # numbers of a head that one vector holds


class NotDescribed(Exception):
    """The model has no native step; the message is the reason."""


def described(model: PreTrainedModel, experts: Mapping[int, str]) -> DecoderModel:
    """The model's layers as the native step takes them; `experts` has the path of each layer's. Raises NotDescribed."""
    name = type(model).__name__
    if name not in FAMILIES or type(model).__module__.partition(".")[0] != "transformers":
        raise NotDescribed(f"{name} is none of {', '.join(FAMILIES)}")
    base: Any = model.model
    config = model.config
    _check_config(config)
    check_unchanged(model, {id(model.get_submodule(path)) for path in experts.values()})
    blocks = list(base.layers)
    if set(experts) != set(range(len(blocks))):
        raise NotDescribed("some of its layers have no experts")
    embedding = base.embed_tokens.weight
    _check_tensor("embedding", embedding, embedding.dtype)
    attention = blocks[0].self_attn
    if attention.head_dim % MULTIPLE:
        raise NotDescribed(f"its heads have {attention.head_dim} numbers, not a multiple of {MULTIPLE}")

    def rotary(positions: int) -> tuple[Tensor, Tensor]:
        cosines, sines = base.rotary_emb(embedding[:0], torch.arange(positions, device=embedding.device)[None])
        return cosines[0].contiguous(), sines[0].contiguous()

    result = DecoderModel(
        layers=tuple(_layer(block, index, embedding.dtype) for index, block in enumerate(blocks)),
        embedding=embedding,
        final_norm=base.norm.weight,
        head=_linear("head", model.lm_head, embedding.dtype),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        epsilon=config.rms_norm_eps,
        scaling=attention.scaling,
        experts_per_token=config.num_experts_per_tok,
        normalised=getattr(config, "norm_topk_prob", True),
        float_weights=FAMILIES[name],
        rotary=rotary,
    )
    if len({tensor.device for tensor in result.tensors}) > 1:
        raise NotDescribed("its parts are on several devices")
    return result


def _check_config(config: Any) -> None:
    if getattr(config, "sliding_window", None) is not None:
        raise NotDescribed("its attention has a sliding window")
    if getattr(config, "clip_qkv", None) is not None:
        raise NotDescribed("its attention clips queries, keys and values")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in STATIC_ROPES:
        raise NotDescribed(f"its rotary embedding is of type {rope}")
    if config._attn_implementation not in ATTENTION:
        raise NotDescribed(f"its attention is computed by {config._attn_implementation}")


def check_unchanged(model: nn.Module, experts: set[int]) -> None:
    """No module may have been changed: a hook or another forward must be called."""
    for path, module in _below(model, experts):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            raise NotDescribed(f"{path} has a hook, or a forward of its own")
        if getattr(module, "parametrizations", None):
            raise NotDescribed(f"{path} has parametrizations")


def _below(model: nn.Module, experts: set[int]) -> Iterator[tuple[str, nn.Module]]:
    base = getattr(model, "base_model", model)
    for path, module in model.named_modules():
        if module is not model and module is not base and id(module) not in experts:
            yield path, module


def _layer(block: Any, index: int, dtype: torch.dtype) -> DecoderLayer:
    attention = block.self_attn

    def norm(name: str, module: nn.Module | None) -> Tensor | None:
        return None if module is None else _check_tensor(name, cast("Any", module).weight, dtype)

    return DecoderLayer(
        index=index,
        input_norm=_check_tensor("norm", block.input_layernorm.weight, dtype),
        experts_norm=_check_tensor("norm", block.post_attention_layernorm.weight, dtype),
        query=_linear("query", attention.q_proj, dtype),
        key=_linear("key", attention.k_proj, dtype),
        value=_linear("value", attention.v_proj, dtype),
        output=_linear("output", attention.o_proj, dtype),
        router=LinearLayer(_check_tensor("router", block.mlp.gate.weight, dtype)),
        query_norm=norm("norm of queries", getattr(attention, "q_norm", None)),
        key_norm=norm("norm of keys", getattr(attention, "k_norm", None)),
    )


def _linear(name: str, module: nn.Module, dtype: torch.dtype) -> LinearLayer:
    if isinstance(module, PackedLinear) and module.weight.data.is_cpu:
        return LinearLayer(module.weight, module.bias)
    if type(module) is not nn.Linear:
        raise NotDescribed(f"its {name} is a {type(module).__name__}")
    bias = None if module.bias is None else _check_tensor(f"{name}'s bias", module.bias, dtype)
    return LinearLayer(_check_tensor(name, module.weight, dtype), bias)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype or dtype not in (torch.float32, torch.bfloat16) or tensor.is_meta:
        raise NotDescribed(f"its {name} is {tensor.dtype} on {tensor.device}")
    return tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
