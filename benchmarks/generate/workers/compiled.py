"""torch.compile's step: transformers' model in one graph, with goldsmith's experts and packed layers as operators."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from goldsmith import experts
from goldsmith.experts.packed.experts import PackedExperts

from .ours import GoldsmithEngine
from .plain import DTYPES, Timed, plain_model


class OneOperator(nn.Module):
    """The experts of a layer as a single call of `experts.moe`."""

    def __init__(self, packed: PackedExperts, compute: str) -> None:
        super().__init__()
        self.packed, self.compute = packed, compute

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        y = experts.moe(x, top_k_index, top_k_weights, self.packed, compute=self.compute, backend="native")
        return y.view(hidden_states.shape)


class CompiledEngine(GoldsmithEngine):
    """The step is compiled by inductor without graph breaks, over a static cache; prompts run as the model's own."""

    inference = True

    def load(self) -> str:
        from goldsmith.hf.offload.dense_format import pack_dense
        from goldsmith.hf.offload.layers import layers_of

        note = super().load()
        store, format = self.offloaded.engine.store, self.options.get("dense_format")
        compute = "int8" if self.options.get("compute") == "int8" else "float"
        # a model without the engine's hooks, which are Python that inductor cannot compile
        model = self.model = plain_model(self.options, DTYPES[self.options["dtype"]], "eager", experts=False)
        if format is not None:
            pack_dense(model, layers_of(model), format)
        for layer, block in enumerate(model.model.layers):
            block.mlp.experts = OneOperator(store.experts(layer), compute)
        self._step = torch.compile(model.forward, fullgraph=True, dynamic=False)
        return note

    def logits(self, ids: list[int]) -> Tensor:
        """By steps of one token, because these are what is compiled."""
        cache, rows = self._cache(), []
        for position, token in enumerate(ids):
            rows.append(self._logits(cache, token, position))
        return torch.stack(rows).float()

    def prompt(self, ids: list[int]) -> float:
        began = time.perf_counter()
        self._first(ids, self._cache())
        return time.perf_counter() - began

    def decode(self, ids: list[int], count: int) -> Timed:
        cache, seconds = self._cache(), []
        tokens = [self._first(ids, cache)]
        for position in range(len(ids), len(ids) + count):
            began = time.perf_counter()
            tokens.append(int(self._logits(cache, tokens[-1], position).argmax()))
            seconds.append(time.perf_counter() - began)
        return seconds, tokens

    def _cache(self) -> Any:
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=self.options["context"])

    def _first(self, ids: list[int], cache: Any) -> int:
        logits = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    def _logits(self, cache: Any, token: int, position: int) -> Tensor:
        ids, places = torch.tensor([[token]]), torch.tensor([[position]])
        output = self._step(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True)
        logits: Tensor = output.logits
        return logits[0, -1]
