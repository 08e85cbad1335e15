"""The weights of a model, tensor by tensor, by their names in a GGUF file: drawn at random, or read from a folder."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from goldsmith.cli.terminal import Failure

from .shapes import DISTINCT, Shape

# suffixes in a layer: the name in a GGUF file, and in transformers
DENSE = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
PLAIN = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
EMBEDDING, NORM, HEAD = "token_embd", "output_norm", "output"


class Source(Protocol):
    """Tensors in float32 by their names in a GGUF file, without ".weight"."""

    def tensor(self, name: str) -> Tensor: ...


def names(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, kind, sizes) of every tensor; kind is "experts", "dense", or "plain", which is float32 in every file."""
    yield EMBEDDING, "dense", (shape.vocabulary, shape.H)
    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {"attn_q": (inner, shape.H), "attn_k": (kv, shape.H), "attn_v": (kv, shape.H),
                "attn_output": (shape.H, inner)}  # fmt: skip
    head = (shape.head_dim,)
    plain = {"attn_norm": (shape.H,), "ffn_norm": (shape.H,), "attn_q_norm": head, "attn_k_norm": head,
             "ffn_gate_inp": (shape.E, shape.H)}  # fmt: skip
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        yield from ((prefix + name, "plain", sizes) for name, sizes in plain.items())
        yield from ((prefix + name, "dense", sizes) for name, sizes in matrices.items())
        for name in EXPERTS:
            sizes = (shape.E, shape.H, shape.I) if "down" in name else (shape.E, shape.I, shape.H)
            yield prefix + name, "experts", sizes
    yield NORM, "plain", (shape.H,)
    if not shape.tied:
        yield HEAD, "dense", (shape.vocabulary, shape.H)


class RandomWeights:
    """Normal weights of standard deviation inputs^-0.5, exact in bfloat16; norms are 1. A name fixes the numbers."""

    def __init__(self, shape: Shape) -> None:
        self.sizes = {name: sizes for name, _, sizes in names(shape)}

    def tensor(self, name: str) -> Tensor:
        sizes = self.sizes[name]
        if len(sizes) == 1:
            return torch.ones(sizes)
        make = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        count = min(sizes[0], DISTINCT) if len(sizes) == 3 else sizes[0]
        drawn = torch.empty(count, *sizes[1:]).normal_(0.0, 1.0, generator=make)
        if name != EMBEDDING:
            drawn *= sizes[-1] ** -0.5
        return drawn.bfloat16().float()


class FolderWeights:
    """The weights in a folder of transformers' layout, with one tensor for each expert or one for all of a layer."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        from safetensors import safe_open

        self.folder, self.shape, self.places = folder, shape, {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = safe_open(path, "pt")
                self.places |= dict.fromkeys(file.keys(), file)
        except Exception as error:  # safetensors raises its own kind
            raise Failure(f"--model {folder}: its weights cannot be read: {error}.") from error

    def tensor(self, name: str) -> Tensor:
        fixed = {EMBEDDING: "model.embed_tokens", NORM: "model.norm", HEAD: "lm_head"}
        if name in fixed:
            return self._read(f"{fixed[name]}.weight")
        _, layer, suffix = name.split(".")
        prefix = f"model.layers.{layer}."
        if suffix not in EXPERTS:
            return self._read(f"{prefix}{(DENSE | PLAIN)[suffix]}.weight")
        projection, fused = EXPERTS[suffix], f"{prefix}mlp.experts."
        if fused + "down_proj" in self.places:
            both = self._read(fused + ("down_proj" if "down" in suffix else "gate_up_proj"))
            return both if "down" in suffix else both.chunk(2, 1)["up" in suffix].contiguous()
        return torch.stack([self._read(f"{fused}{e}.{projection}.weight") for e in range(self.shape.E)])

    def _read(self, name: str) -> Tensor:
        if name not in self.places:
            raise Failure(f"--model {self.folder}: the tensor {name} is missing in its .safetensors files.")
        tensor: Tensor = self.places[name].get_tensor(name)
        return tensor.float()
