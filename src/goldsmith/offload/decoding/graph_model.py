"""The step of a described decoder model on a device: products of torch, and kernels that do the rest of a layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ..engine import Engine
from ..lanes.kernels import kernel_module
from .graph import StepInputs
from .model import DecoderLayer, DecoderModel, LinearLayer


class GraphModel:
    """logits [rows, vocabulary] = run(inputs), for `GraphStep`: about 16 launches a layer instead of 65."""

    def __init__(self, engine: Engine, model: DecoderModel) -> None:
        self._engine, self._model = engine, model
        self._angles: tuple[Tensor, Tensor] | None = None

    def __call__(self, inputs: StepInputs) -> Tensor:
        model, kernels = self._model, kernel_module("offload.decoding._triton_dense")
        capacity = inputs.keys[0].shape[2]
        if self._angles is None or len(self._angles[0]) < capacity:  # in the rehearsal
            self._angles = model.rotary(capacity)
        x = embedding(inputs.tokens.view(-1), model.embedding)
        more: Tensor | None = None
        for i, layer in enumerate(model.layers):
            x, y = kernels.norm(x, layer.input_norm, model.epsilon, more)
            more = self._attention(layer, y, inputs, i)
            x, y = kernels.norm(x, layer.experts_norm, model.epsilon, more)
            dtype = torch.float32 if model.float_weights else y.dtype
            ids, weights = kernels.choose(
                _product(layer.router, y), model.experts_per_token, normalised=model.normalised, dtype=dtype
            )
            more = self._engine(layer.index, y, ids, weights)
        _, y = kernels.norm(x, model.final_norm, model.epsilon, more)
        return _product(model.head, y)

    def _attention(self, layer: DecoderLayer, y: Tensor, inputs: StepInputs, index: int) -> Tensor:
        model, kernels = self._model, kernel_module("offload.decoding._triton_dense")
        query, key, value = (_product(each, y) for each in (layer.query, layer.key, layer.value))
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            if layer.query_norm.numel() == model.head_dim:
                norms = layer.query_norm, layer.key_norm
            else:  # of all heads together
                query = kernels.norm(query, layer.query_norm, model.epsilon)[1]
                key = kernels.norm(key, layer.key_norm, model.epsilon)[1]
        keys, values = inputs.keys[index], inputs.values[index]
        query = kernels.place_heads(
            (query, key, value), norms, self._angles, inputs.positions, inputs.last, keys, values, model.epsilon
        )
        attend = kernel_module("offload.decoding._triton").attend
        mixed = attend(query, keys, values, inputs.last, inputs.starts, model.scaling)
        return _product(layer.output, mixed.view(len(y), -1))


def _product(layer: LinearLayer, x: Tensor) -> Tensor:
    if not isinstance(layer.weight, Tensor):
        raise TypeError("offload: a step on a device needs plain weights")
    y = linear(x, layer.weight, layer.bias)
    if layer.lora is None:
        return y
    down, up = layer.lora
    return (y + linear(linear(x.float(), down), up)).to(y.dtype)
