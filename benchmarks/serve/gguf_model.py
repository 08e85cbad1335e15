"""A Qwen3-MoE with a byte-level tokenizer as a GGUF file for llama.cpp's server, its matrices in one type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import AutoModelForCausalLM

CONTROL, NORMAL = 3, 1  # token types


def write(folder: Path, path: Path, kind: str = "BF16") -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).float()
    config, writer = model.config, gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name(folder.name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            layer, halves = name.split(".")[2], weight.chunk(2, 1) if "gate_up" in name else (weight,)
            for projection, half in zip(("gate", "up") if "gate_up" in name else ("down",), halves):
                _add(writer, f"blk.{layer}.ffn_{projection}_exps.weight", half.numpy(), kind)
        else:
            plain = weight.dim() == 1 or "mlp.gate" in name  # llama.cpp keeps norms and routers in float32
            _add(writer, f"{names.get_name(stem)}.{leaf}", weight.numpy(), "F32" if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, weight: np.ndarray, kind: str) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(np.ascontiguousarray(weight), stored)
    writer.add_tensor(name, data, raw_dtype=None if kind == "F32" else stored)


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    vocabulary = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocabulary["<|end|>"])
    writer.add_bos_token_id(vocabulary["<|end|>"])
    writer.add_add_bos_token(False)
