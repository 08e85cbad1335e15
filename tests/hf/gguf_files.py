"""GGUF files of tiny models, written by the package gguf, and the float models that they represent."""

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
Type = gguf.GGMLQuantizationType

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
QUIET = {"mlp_only_layers": [], "moe_intermediate_size": 64}


def blocks(weight, kind, seed=0):
    """The tensor in blocks of a type: quantised by the package, or random where it can only decode."""
    try:
        return gguf.quants.quantize(np.ascontiguousarray(weight, np.float32), kind)
    except NotImplementedError:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        generator = np.random.default_rng(seed)
        data = generator.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // per_block, size), np.uint8)
        floats = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.Q3_K: (108,), Type.IQ4_NL: (0,)}[kind]
        for at in floats:
            scales = generator.uniform(1e-4, 1e-3, data.shape[:-1]).astype(np.float16)
            data[..., at : at + 2] = scales[..., None].view(np.uint8)
        return data.reshape(*weight.shape[:-1], -1)


def write(path, model, kinds=None, dense=Type.F32, *, parts=1, fields=()):
    """Writes the model to a GGUF file, and the numbers that it holds into the model.

    kinds   type of the experts' gate, up and down; dense: type of all other matrices
    parts   the number of files into which the model is split
    fields  further calls of the writer: (name of the method, *arguments)
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    kinds = kinds or dict.fromkeys(("gate", "up", "down"), Type.F32)
    names = gguf.get_tensor_name_map(_number_of(architecture), config.num_hidden_layers)
    tensors = {}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if ".experts." in name and config.model_type == "gpt_oss":
                _of_gpt_oss(tensors, name, weight, kinds)
                continue
            if ".experts." in name:
                layer, halves = name.split(".")[2], weight.chunk(2, 1) if "gate_up" in name else (weight,)
                for projection, half in zip(("gate", "up") if "gate_up" in name else ("down",), halves):
                    data = blocks(half.numpy(), kinds[projection], seed=len(tensors))
                    half.copy_(torch.from_numpy(decoded(data, kinds[projection])))
                    tensors[f"blk.{layer}.ffn_{projection}_exps.weight"] = data, kinds[projection]
                continue
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stem, _, leaf = name.rpartition(".")
            kind = dense if weight.dim() == 2 and "norm" not in name and weight.shape[-1] % 32 == 0 else Type.F32
            if "shared_expert_gate" in name:  # llama.cpp stores a vector
                weight = weight.squeeze(0)
            data = blocks(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(decoded(data, kind)))
            if leaf == "sinks":
                stem, leaf = name, "weight"
            tensors[f"{names.get_name(stem)}.{leaf}"] = data, kind
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path] if parts == 1 else [
        path.with_name(f"{path.stem}-{k + 1:05}-of-{parts:05}.gguf") for k in range(parts)
    ]  # fmt: skip
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, architecture)
        if number == 0:
            _describe(writer, config)
            for method, *arguments in fields:
                getattr(writer, method)(*arguments)
        for name in sorted(tensors)[number::parts]:
            data, kind = tensors[name]
            floats = kind in (Type.F32, Type.F16)
            writer.add_tensor(name, data, raw_dtype=None if floats else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files[0]


def _of_gpt_oss(tensors, name, weight, kinds):
    """Experts that the model holds transposed, with gates and ups in turn, and their biases."""
    layer, bias = name.split(".")[2], name.endswith("bias")
    upright = weight if bias else weight.mT
    halves = {"gate": upright[:, 0::2], "up": upright[:, 1::2]} if "gate_up" in name else {"down": upright}
    for projection, half in halves.items():
        kind = Type.F32 if bias else kinds[projection]
        data = blocks(half.numpy(), kind)
        half.copy_(torch.from_numpy(decoded(data, kind)))
        tensors[f"blk.{layer}.ffn_{projection}_exps.{'bias' if bias else 'weight'}"] = data, kind


def decoded(data, kind):
    return data.astype(np.float32) if kind in (Type.F32, Type.F16) else gguf.dequantize(data, kind)


def _describe(writer, config):
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type == "gpt_oss":
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3_moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)


def _number_of(architecture):
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def byte_tokenizer(special=("<|end|>", "<|pad|>")):
    """Calls of the writer for a tokenizer with one token a byte, one merge, and special tokens."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", *special]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(special)) + [gguf.TokenType.CONTROL] * len(special)
    return [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "qwen2"),
        ("add_token_list", tokens),
        ("add_token_types", kinds),
        ("add_token_merges", ["t h"]),
        ("add_eos_token_id", tokens.index(special[0])),
        ("add_pad_token_id", tokens.index(special[1])),
    ]


QWEN35_NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip


def qwen35(path, model, kind):
    """A file of architecture qwen35moe with random numbers, whose meaning transformers' own loader gives."""
    config, generator = model.config, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen35moe")
    key = "qwen35moe."
    for name, value in {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "full_attention_interval": 4, "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim, "rope.dimension_count": 4,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_count": config.num_experts,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_used_count": config.num_experts_per_tok,
    }.items():  # fmt: skip
        writer.add_uint32(key + name, value)
    writer.add_float32(key + "attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(key + "rope.freq_base", 1e4)
    writer.add_array(key + "rope.dimension_sections", [1, 1, 0, 0])
    writer.add_token_list([f"t{k}" for k in range(config.vocab_size)])
    for name, weight in model.state_dict().items():
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        shape, stem = list(weight.shape), name.removesuffix(".weight")
        if ".experts." in name:
            for part in ("gate", "up") if "gate_up" in name else ("down",):
                size = [shape[0], shape[1] // 2, shape[2]] if part != "down" else shape
                data = blocks(generator.normal(size=size), kind)
                writer.add_tensor(f"{layer}ffn_{part}_exps.weight", data, raw_dtype=kind)
            continue
        mine = QWEN35_NAMES[stem.partition(".layers.")[2].partition(".")[2] or stem]
        numbers = generator.normal(size=[size for size in shape if size != 1]).astype(np.float32)
        numbers = -np.abs(numbers) if mine == "ssm_a" else numbers
        writer.add_tensor(layer + mine + ("" if mine in ("ssm_a", "ssm_dt.bias") else ".weight"), numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
