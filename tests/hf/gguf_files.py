"""GGUF files of tiny models, written by the package gguf, and the float models that they represent."""

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
Type = gguf.GGMLQuantizationType

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
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
            if ".experts." in name:
                layer, halves = name.split(".")[2], weight.chunk(2, 1) if "gate_up" in name else (weight,)
                for projection, half in zip(("gate", "up") if "gate_up" in name else ("down",), halves):
                    data = blocks(half.numpy(), kinds[projection], seed=len(tensors))
                    half.copy_(torch.from_numpy(decoded(data, kinds[projection])))
                    tensors[f"blk.{layer}.ffn_{projection}_exps.weight"] = data, kinds[projection]
                continue
            stem, _, leaf = name.rpartition(".")
            kind = dense if weight.dim() == 2 and "norm" not in name and weight.shape[-1] % 32 == 0 else Type.F32
            data = blocks(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(decoded(data, kind)))
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


def decoded(data, kind):
    return data.astype(np.float32) if kind in (Type.F32, Type.F16) else gguf.dequantize(data, kind)


def _describe(writer, config):
    writer.add_block_count(config.num_hidden_layers)
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
