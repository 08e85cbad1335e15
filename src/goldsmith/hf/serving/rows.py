"""Rows: texts that step together, with their keys and values in one cache, padded on the left."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..rotary_lengths import length_types, recomputed_at
from .running_text import RunningText

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CacheKind:
    """What may be done with a model's caches.

    joined    rows of one batch: every layer keeps all keys and values
    chunked   a prompt in several calls: other layers (linear attention) may start again with each call of many tokens
              neither with a rotary embedding that takes one length for a whole call
    alone     no second text between two steps of one: a multimodal class may keep positions of its last input
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kinds = {type(layer) for layer in new_cache(model).layers}
        self.alone = not type(model).__name__.endswith("ForCausalLM")
        divisible = not self.alone and not length_types(model)
        self.joined = kinds <= {DynamicLayer} and divisible
        self.chunked = kinds <= {DynamicLayer, DynamicSlidingWindowLayer} and divisible


def _layers(cache: DynamicCache) -> list[Any]:
    """Its layers, whose classes have no common type with keys and values."""
    return cast("list[Any]", cache.layers)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


class Rows:
    """Texts with a token each that the model has not seen, and one cache of everything before it."""

    def __init__(self, texts: Sequence[RunningText], cache: DynamicCache) -> None:
        self.texts, self.cache = list(texts), cache
        self.broken = False  # whether an error left the rows of the layers unlike each other

    @property
    def adapter(self) -> str | None:
        return self.texts[0].request.adapter

    def step(self, model: PreTrainedModel) -> Tensor:
        """The logits [rows, vocabulary] after one more token of every row."""
        seen = [len(text.ids) - 1 for text in self.texts]
        width = max(seen)
        if len(seen) == 1 and width + 1 == recomputed_at(model):
            self.cache = new_cache(model)
            return prefill(model, self.texts[0].ids, self.cache, range(width + 1))
        self._cut(width)
        lengths = torch.tensor(seen, device=model.device)
        mask = None
        if min(seen) < width:
            mask = (torch.arange(width + 1, device=model.device) >= (width - lengths)[:, None]).long()
        last = torch.tensor([[text.ids[-1]] for text in self.texts], device=model.device)
        return forward(model, last, self.cache, positions=lengths[:, None], mask=mask)

    def join(self, other: Rows) -> None:
        """Adds the rows of another batch."""
        mine, theirs = self._width, other._width
        pairs = [(layer, more, name) for layer, more in zip(_layers(self.cache), _layers(other.cache))
                 for name in ("keys", "values")]  # fmt: skip
        joined = 0
        try:
            for layer, more, name in pairs:
                own = pad(getattr(layer, name), (0, 0, max(0, theirs - mine), 0))
                setattr(layer, name, torch.cat((own, pad(getattr(more, name), (0, 0, max(0, mine - theirs), 0)))))
                joined += 1
        except BaseException:  # no memory: the rows that were here go on as before
            for layer, _, name in pairs[:joined]:
                setattr(layer, name, getattr(layer, name)[: len(self.texts), :, -mine:])
            raise
        self.texts += other.texts

    def keep(self, texts: Sequence[RunningText]) -> None:
        """Drops all rows but those of these texts, and the padding that no row needs any more."""
        if len(texts) == len(self.texts):
            return
        at = [row for row, text in enumerate(self.texts) if any(text is kept for kept in texts)]
        self.texts = [self.texts[row] for row in at]
        if at:
            self._select(self.cache, at)

    def separate(self) -> list[Rows]:
        """Every row as a batch of its own."""
        self._cut(self._width)
        single = []
        for row, text in enumerate(self.texts):
            cache = DynamicCache()
            for index, layer in enumerate(_layers(self.cache)):
                cache.update(layer.keys[row : row + 1], layer.values[row : row + 1], index)
            rows = Rows([text], cache)
            rows._cut(rows._width, left=True)
            single.append(rows)
        return single

    @property
    def _width(self) -> int:
        return max(len(text.ids) - 1 for text in self.texts)

    def _select(self, cache: DynamicCache, at: Sequence[int]) -> None:
        self.broken = True
        width, index = self._width, torch.tensor(at, device=_layers(cache)[0].keys.device)
        for layer in _layers(cache):
            layer.keys = layer.keys.index_select(0, index)[..., -width:, :].contiguous()
            layer.values = layer.values.index_select(0, index)[..., -width:, :].contiguous()
        self.broken = False

    def _cut(self, width: int, *, left: bool = False) -> None:
        """Drops what a step that failed left behind in some of the layers."""
        for layer in _layers(self.cache):
            whole = type(layer) is DynamicLayer
            if whole and layer.get_seq_length() > width:
                at = slice(-width, None) if left else slice(None, width)
                layer.keys, layer.values = layer.keys[..., at, :], layer.values[..., at, :]


def prefill(model: PreTrainedModel, ids: Sequence[int], cache: DynamicCache, part: range) -> Tensor:
    """The logits [1, vocabulary] after these positions of a text; the cache has those before."""
    tokens = torch.tensor([ids[part.start : part.stop]], device=model.device)
    return forward(model, tokens, cache, positions=torch.arange(part.start, part.stop, device=model.device)[None])


def forward(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache, *, positions: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The logits [rows, vocabulary] of the last column of `ids`, in float32."""
    extra: dict[str, Any] = {"logits_to_keep": 1} if _takes_logits_to_keep(type(model)) else {}
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **extra
    )
    return output.logits[:, -1].float()


_TAKES: dict[type, bool] = {}  # by class of model


def _takes_logits_to_keep(kind: type[nn.Module]) -> bool:
    if kind not in _TAKES:
        _TAKES[kind] = "logits_to_keep" in inspect.signature(kind.forward).parameters
    return _TAKES[kind]
