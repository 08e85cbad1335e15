"""A tiny random model of every mixture-of-experts class that the installed transformers has.

Configs are made small by their fields' names. `SPECIAL` has what a class needs besides.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# the auto mappings of classes that give logits over tokens, in order of preference
MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION")
HAS_EXPERTS = re.compile(r"class \w*Experts\w*\(")
INDIRECT = ("kimi_k25",)  # types whose experts are those of another type, named in their text config
ALIKE = (
    "seamless_m4t",
    "seamless_m4t_v2",
    "vitpose",
)  # a word "experts" in their source, and no language model of experts

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "num_text_tokens", "n_words"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "hidden_dim", "n_embd", "out_hidden_size"), 32),
    **dict.fromkeys(("output_hidden_size", "projector_hidden_size", "adapter_hidden_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp", "d_ff", "dense_intermediate_size"), 48
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "moe_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads",), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 16,
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"), 8
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts", "moe_top_k"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "num_expert_group", "num_limited_groups"), 1),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ERNIE_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_KV = {"num_key_value_heads": 2}
_SAM = {
    "mlp_dim": 48,
    "global_attn_indexes": (1,),
    "downsample_channels": [32, 32],
    "output_channels": 32,
    "window_size": 2,
}
_AUDIO = {
    "encoder_layers": 1,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "output_dim": 32,
    "downsample_hidden_size": 16,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {"vision_config": {"model_type": "idefics3_vision"}, "projector_patch_to_query_dict": {4: 4}},
    "axk2": _KV,
    "bailing_hybrid": _MIXED,
    "beam": {"num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 24},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 2},
    "deepseek_ocr2_sam_vision_model": _SAM,
    "deepseek_ocr2_encoder": {"vocab_size": 64},
    "deepseek_v32": _KV,
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}, "canvas_length": 8},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": _KV,
    "dots3_note_text": _KV,
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"num_hidden_layers": 42, "adapter_in_dim": 32, "adapter_out_dim": 32},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 16], "rope_parameters": _ERNIE_ROPE},
    "flint": {"num_hidden_layers": 2, "mlp_only_layers": [0]},
    "gemma4_text": {"enable_moe_block": True, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "gemma4_vision": {"position_embedding_size": 64, "num_key_value_heads": 2},
    "gemma4_audio": {"subsampling_conv_channels": (8, 8), "output_proj_dims": 32},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
    },
    "glm5_next_text": {
        **_MIXED,
        "num_key_value_heads": 2,
        "qk_rope_head_dim": 0,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": _KV,
    "granitemoehybrid": _MIXED,
    "inkling2_vision": {"text_hidden_size": 32, "posemb_grid_size": 4, "projection_hidden_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "kimi_linear": _MIXED,
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3", "first_k_dense_replace": 1},
        "projection_hidden_size": 32,
    },
    "kimi_k25_vision": {"pos_emb_height": 4, "pos_emb_width": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_key_value_heads": 2, "zero_expert_num": 4, "head_dim": 8},
    "mistral_large4": {"vision_config": {"model_type": "pixtral"}},
    "mistral_large4_text": {"num_key_value_heads": 2, "head_dim": 8},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": (8, 8, 16, 16), "depths": (1, 1, 1, 1)},
    "muse_spark_text": {"moe_hidden_size": 16},
    "muse_spark_vision": {"pos_emb_height": 4, "pos_emb_width": 4},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen3_5_moe_text": _MIXED,
    "qwen3_next": _MIXED,
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"layer_types": ["linear_attention", "full_attention"], "indexer_compress_ratio": 2},
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 40, "vision_end_token_id": 41},
    "qwen3_omni_moe": {"enable_audio_output": False, "talker_config": None, "code2wav_config": None},
    "qwen3_omni_moe_audio_encoder": _AUDIO,
    "qwen3_omni_moe_vision_encoder": {"num_position_embeddings": 16, "deepstack_visual_indexes": (0,)},
    "qwen3_vl_moe_vision": {"num_position_embeddings": 16, "deepstack_visual_indexes": (0,)},
    "step3p5": {"sliding_window": 8, "mlp_layer_types": ["dense", "sparse"], "share_expert_dim": 24},
    "unlimited_ocr_text": _KV,
    "unlimited_ocr_sam_vision_model": _SAM,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


@cache
def model_types() -> dict[str, str]:
    """{model type: class name} of every class with experts, in alphabetical order."""
    folder = Path(transformers.__file__).parent / "models"
    modules = {
        path.parent.name for path in folder.glob("*/modeling_*.py") if HAS_EXPERTS.search(path.read_text())
    } - set(ALIKE)
    types: dict[str, str] = {}
    for name in MAPPINGS:
        for model_type, class_name in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}).items():
            module = configuration_auto.model_type_to_module_name(model_type)
            if module in modules or model_type in INDIRECT:
                class_name = class_name[0] if isinstance(class_name, (tuple, list)) else class_name
                if name != MAPPINGS[0] and _has_parts(model_type):  # the class that such a checkpoint names
                    types[model_type] = class_name
                types.setdefault(model_type, class_name)
    return dict(sorted(types.items()))


def _has_parts(model_type: str) -> bool:
    """Whether the config has a text config in it, so that a class for text alone is not the whole model."""
    return "text_config" in (getattr(CONFIG_MAPPING[model_type], "sub_configs", None) or {})


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The config of this type with small sizes."""
    return _small(CONFIG_MAPPING[model_type], {**SPECIAL.get(model_type, {}), **changes})


def _small(config_class: Any, special: Mapping[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in SMALL.items() if name in names}
    special = dict(special)
    for name, sub in (getattr(config_class, "sub_configs", None) or {}).items():
        changes = special.pop(name, {})
        if changes is None:
            values[name] = None
            continue
        sub_class = CONFIG_MAPPING[changes["model_type"]] if "model_type" in changes else sub
        if dataclasses.is_dataclass(sub_class) and "model_type" in vars(sub_class):
            own = SPECIAL.get(sub_class.model_type, {}) | {k: v for k, v in changes.items() if k != "model_type"}
            values[name] = _small(sub_class, own)
    return config_class(**(values | special))


def tiny_model(model_type: str, *, device: str = "cpu", seed: int = 0, **changes: Any) -> Any:
    """A model of this type, in float32, in which every weight matters."""
    name = model_types()[model_type]
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    model_class: Any = getattr(transformers, name)
    text = config.sub_configs.get("text_config")
    if text is not None and model_class.config_class is text and type(config) is not text:
        config = config.get_text_config()
    with torch.device(device):
        model = model_class._from_config(config, dtype=torch.float32)
    if device != "meta":
        randomise(model, seed)
    return model.eval()


def randomise(model: nn.Module, seed: int) -> None:
    """Draws every matrix at random, of a size that keeps activations near 1; leaves norms and vectors as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2 and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def experts_named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that look like experts, by class name."""
    for path, module in model.named_modules():
        if re.search(r"Experts", type(module).__name__) and "Shared" not in type(module).__name__:
            yield path, module
