"""The description of a decoder model whose step the native library can compute, in tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...experts import PackedMatrix

MOST_ROWS = 8  # sequences of a step; with more, a layer's own products are faster


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """y = weight x + bias + up (down x); lora: (down [r, in], up [out, r]) in float32"""

    weight: Tensor | PackedMatrix
    bias: Tensor | None = None
    lora: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """h += output(attention(norm(h))), then h += experts(norm(h)); `index` is the layer's number in the store

    query_norm, key_norm   weights of norms over a head [D], or over all heads [heads D]; None: no norms
    router                 probabilities of the experts are softmax(router x); its top-k are used; no LoRA
    """

    index: int
    input_norm: Tensor
    experts_norm: Tensor
    query: LinearLayer
    key: LinearLayer
    value: LinearLayer
    output: LinearLayer
    router: LinearLayer
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DecoderModel:
    """The layers of a model, and what is before and after them

    rotary          rotary(positions) -> (cosines, sines) [positions, D] in the model's dtype
    normalised      whether the weights of a token's experts are divided by their sum
    float_weights   whether these weights stay float32 in a model of 16 bits
    """

    layers: tuple[DecoderLayer, ...]
    embedding: Tensor
    final_norm: Tensor
    head: LinearLayer
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    scaling: float
    experts_per_token: int
    normalised: bool
    float_weights: bool
    rotary: Callable[[int], tuple[Tensor, Tensor]]

    @property
    def tensors(self) -> list[Tensor]:
        """All weights; the bytes of packed ones."""
        weights: list[Tensor | PackedMatrix | None] = [self.embedding, self.final_norm]
        linear = [self.head]
        for layer in self.layers:
            weights += layer.input_norm, layer.experts_norm, layer.query_norm, layer.key_norm
            linear += layer.query, layer.key, layer.value, layer.output, layer.router
        for each in linear:
            weights += each.weight, each.bias
        return [each.data if isinstance(each, PackedMatrix) else each for each in weights if each is not None]
