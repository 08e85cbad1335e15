"""Sizes of real models of the type Qwen3-MoE, and the bytes of their parts in each format."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from goldsmith.cli.terminal import Failure

# bits of a weight, with the float16 scale of each 32 weights of Q4_0 and Q8_0
BITS = {"int4": 4.5, "int8": 8.5, "bf16": 16.0, "fp32": 32.0}
MODEL_TYPE = "qwen3_moe"
CACHE_BYTES = 4  # of a key or value, at most: float32
# names in config.json; the number of experts is `num_local_experts` since transformers 5
FIELDS = {
    "layers": "num_hidden_layers", "H": "hidden_size", "I": "moe_intermediate_size", "E": "num_experts",
    "k": "num_experts_per_tok", "vocabulary": "vocab_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
}  # fmt: skip
DISTINCT = 16  # experts of a layer with weights of their own; the others are copies, so that drawing is quick


@dataclass(frozen=True)
class Shape:
    """`layers` layers of E experts of H x I, k per token, and grouped-query attention."""

    name: str
    layers: int
    H: int
    I: int
    E: int
    k: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float = 1e6
    epsilon: float = 1e-6
    tied: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if name in FIELDS}

    @property
    def attention(self) -> int:
        """Weights of the attention's four matrices in a layer."""
        return self.H * self.head_dim * 2 * (self.heads + self.kv_heads)

    def experts_bytes(self, format: str) -> int:
        """Bytes of a layer's experts."""
        return int(self.E * 3 * self.H * self.I * BITS[format] / 8)

    def dense_bytes(self, format: str) -> int:
        """Bytes of a layer outside its experts; norms and the router are float32."""
        return int(self.attention * BITS[format] / 8) + 4 * (self.E * self.H + 2 * self.H + 2 * self.head_dim)

    def head_bytes(self, format: str) -> int:
        """Bytes of one matrix of the vocabulary."""
        return int(self.vocabulary * self.H * BITS[format] / 8)

    def cache_bytes(self, tokens: int) -> int:
        """An upper bound of the bytes of keys and values."""
        return CACHE_BYTES * 2 * self.layers * self.kv_heads * self.head_dim * tokens

    def file_bytes(self, format: str, dense: str) -> int:
        """Bytes of the model's file."""
        return self.layers * self.experts_bytes(format) + self.outside_bytes(dense)

    def outside_bytes(self, format: str) -> int:
        """Bytes of everything but the experts."""
        return self.layers * self.dense_bytes(format) + (1 if self.tied else 2) * self.head_bytes(format)

    def read_bytes(self, format: str, dense: str) -> int:
        """Bytes of weights that one token reads: k experts of each layer, the attention, routers and the head."""
        experts = self.experts_bytes(format) * self.k // self.E
        return self.layers * (experts + self.dense_bytes(dense)) + self.head_bytes(dense)

    def cut(self, layers: int) -> Shape:
        return replace(self, layers=min(layers, self.layers))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 48, 2048, 768, 128, 8, 151936, 32, 4, 128),  # Qwen3-30B-A3B
        Shape("qwen3-235b", 94, 4096, 1536, 128, 8, 151936, 64, 4, 128),  # Qwen3-235B-A22B
        Shape("small", 8, 1024, 512, 32, 8, 8192, 16, 4, 64, theta=1e4),
        Shape("tiny", 2, 64, 32, 8, 2, 256, 4, 2, 32, theta=1e4),
    )
}


def shape_of(folder: Path) -> Shape:
    """The sizes in a model's config.json. Raises Failure for another type of model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise Failure(f"--model {folder}: its config.json cannot be read: {why}.") from error
    if not isinstance(config, dict) or config.get("model_type") != MODEL_TYPE:
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise Failure(
            f"--model {folder}: its type is {kind!r}, but the file for llama.cpp can be written for {MODEL_TYPE} only."
        )
    config.setdefault("num_experts", config.get("num_local_experts"))
    config.setdefault("head_dim", config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1))
    missing = [field for field in FIELDS.values() if not isinstance(config.get(field), int)]
    if missing or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise Failure(
            f"--model {folder}: "
            + (f"config.json lacks {missing[0]}." if missing else "layers without experts are not supported here.")
        )
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 1e4
    return Shape(
        folder.resolve().name, **{name: config[field] for name, field in FIELDS.items()}, theta=float(theta),
        epsilon=float(config.get("rms_norm_eps", 1e-6)), tied=bool(config.get("tie_word_embeddings")),
    )  # fmt: skip
