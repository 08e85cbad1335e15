"""Tiny models of every family, random, made from configs: nothing is downloaded."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")
peft = pytest.importorskip("peft", reason="needs peft: pip install '.[hf]'")

COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# family -> (config, model, options); the first of two layers is dense if the family allows it
FAMILIES = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_hidden_layers": 1, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"num_hidden_layers": 1, "intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 1,
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"],
        },
    ),
}
# families that take the same paths through goldsmith.hf as one above; goldsmith.offload is tested on them too
MORE = {
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}
# families with weights that transformers keeps in float32, in addition to DeepSeek-V3
KEPT = {
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
}
ALL = FAMILIES | MORE | KEPT
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def config(family, **changes):
    name, _, options = ALL[family]
    return getattr(transformers, name)(**{**COMMON, **options, **changes})


def model(family, *, dtype=torch.float32, implementation="eager", seed=0, **changes):
    """A model with eager experts by default, in which every weight matters."""
    torch.manual_seed(seed)
    model_made = getattr(transformers, ALL[family][1])(config(family, **changes))
    with torch.no_grad():
        for name, parameter in model_made.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3 if "bias" in name else parameter.shape[-1] ** -0.5)
    model_made.set_experts_implementation(implementation)
    return model_made.to(dtype).eval()


def with_peft(plain, *, targets=EXPERTS, rank=4, alpha=6, seed=1, **options):
    """Stock peft over a copy of the model; its B is not zero."""
    model_made = peft.get_peft_model(
        copy.deepcopy(plain), peft.LoraConfig(target_parameters=list(targets), r=rank, lora_alpha=alpha, **options)
    )
    randomise(model_made, seed)
    return model_made


def randomise(model, seed=1):
    """Draws every LoRA parameter at random, so that B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def tokens(rows=2, length=6, seed=2):
    return torch.randint(3, 48, (rows, length), generator=torch.Generator().manual_seed(seed))


def experts_of(model):
    """The first experts module of a model."""
    return next(m for name, m in model.named_modules() if name.endswith("mlp.experts"))
