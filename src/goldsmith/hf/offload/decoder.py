"""The description of a transformers model for a native step, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ...experts import PackedLinear
from ...offload.decoding.model import DecoderLayer, DecoderModel, LinearLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Model classes whose layers are h += attention(norm(h)), h += experts(norm(h)) with RMSNorm, rotary embeddings and a
# softmax router; and whether their routing weights stay in float32. What a module has of its own is read from it: a
# config may have numbers that no module reads.
FAMILIES = {"Qwen3MoeForCausalLM": False, "OlmoeForCausalLM": False, "MixtralForCausalLM": True}
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length of the text
ATTENTION = ("sdpa", "eager")
MULTIPLE = 16  # numbers of a head that one vector holds


T = TypeVar("T")


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
    blocks = list(base.layers)
    if set(experts) != set(range(len(blocks))):
        raise NotDescribed("some of its layers have no experts")
    embedding = base.embed_tokens.weight
    _check_tensor("embedding", embedding, embedding.dtype)
    attentions, gates = [block.self_attn for block in blocks], [block.mlp.gate for block in blocks]
    for attention in attentions:
        _check_config(attention.config)
        if getattr(attention, "sliding_window", None) is not None:
            raise NotDescribed("its attention has a sliding window")
    attention = attentions[0]
    head_dim = _same("head_dim", (each.head_dim for each in attentions))
    heads = _same("heads", (each.q_proj.out_features // head_dim for each in attentions))
    if head_dim % MULTIPLE:
        raise NotDescribed(f"its heads have {head_dim} numbers, not a multiple of {MULTIPLE}")

    def rotary(positions: int) -> tuple[Tensor, Tensor]:
        cosines, sines = base.rotary_emb(embedding[:0], torch.arange(positions, device=embedding.device)[None])
        return cosines[0].contiguous(), sines[0].contiguous()

    result = DecoderModel(
        layers=tuple(_layer(block, index, embedding.dtype) for index, block in enumerate(blocks)),
        embedding=embedding,
        final_norm=base.norm.weight,
        head=_linear("head", model.lm_head, embedding.dtype),
        heads=heads,
        kv_heads=heads // _same("groups of heads", (each.num_key_value_groups for each in attentions)),
        head_dim=head_dim,
        epsilon=_same("epsilons", _epsilons(base, attentions)),
        scaling=_same("scalings", (each.scaling for each in attentions)),
        experts_per_token=_same("top_k", (gate.top_k for gate in gates)),
        normalised=_same("norm_topk_prob", (getattr(gate, "norm_topk_prob", True) for gate in gates)),
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


def _same(name: str, values: Iterable[T]) -> T:
    """The value that all modules have: the step takes one."""
    first, *rest = values
    if any(value != first for value in rest):
        raise NotDescribed(f"its layers have different {name}")
    return first


def _epsilons(model: Any, attentions: list[Any]) -> Iterator[float]:
    yield model.norm.variance_epsilon
    for block in model.layers:
        yield block.input_layernorm.variance_epsilon
        yield block.post_attention_layernorm.variance_epsilon
    for attention in attentions:
        for name in ("q_norm", "k_norm"):
            if hasattr(attention, name):
                yield getattr(attention, name).variance_epsilon


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
    if is_lora_layer(module):
        base = _linear(name, cast("Any", module).base_layer, dtype)
        weight = base.weight if isinstance(base.weight, Tensor) else base.weight.data
        return replace(base, lora=_lora(name, module, weight.device))
    if isinstance(module, PackedLinear) and module.weight.data.is_cpu:
        return LinearLayer(module.weight, module.bias)
    if type(module) is not nn.Linear:
        raise NotDescribed(f"its {name} is a {type(module).__name__}")
    bias = None if module.bias is None else _check_tensor(f"{name}'s bias", module.bias, dtype)
    return LinearLayer(_check_tensor(name, module.weight, dtype), bias)


def is_lora_layer(module: nn.Module) -> bool:
    """Whether the module is peft's LoRA on a linear layer."""
    return (type(module).__module__, type(module).__name__) == ("peft.tuners.lora.layer", "Linear")


def _lora(name: str, layer: Any, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The sum of the layer's active adapters as one pair of factors; None if none is active here."""
    if layer.merged:
        raise NotDescribed(f"its {name} has a merged adapter")
    active = [] if layer.disable_adapters else [each for each in layer.active_adapters if each in layer.lora_A]
    for each in active:
        down, up, dropout = layer.lora_A[each], layer.lora_B[each], layer.lora_dropout[each]
        kinds = {type(down), type(up), type(dropout)} - {nn.Linear, nn.Identity, nn.Dropout}
        biased = down.bias is not None or up.bias is not None
        if each in layer.lora_variant or kinds or biased or (dropout.training and getattr(dropout, "p", 0)):
            raise NotDescribed(f"its {name} has an adapter that is more than up (down x)")
    if not active:
        return None
    downs = [layer.lora_A[each].weight.detach().float() for each in active]
    ups = [layer.lora_B[each].weight.detach().float() * layer.scaling[each] for each in active]
    if any(tensor.device != device for tensor in (*downs, *ups)):
        raise NotDescribed(f"its {name} has an adapter on {downs[0].device}")
    return torch.cat(downs).contiguous(), torch.cat(ups, 1).contiguous()


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype or dtype not in (torch.float32, torch.bfloat16) or tensor.is_meta:
        raise NotDescribed(f"its {name} is {tensor.dtype} on {tensor.device}")
    return tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
