"""How documents in one row are kept from seeing one another, which each model is asked rather than trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...model_types import text_config
from ..errors import TrainingError
from .documents import Document
from .packing import Batch, batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AttentionMask = Tensor | Mapping[str, object] | None  # one mask, or one for each kind of layer
Masks = Callable[[Batch], AttentionMask]  # what a model takes for `attention_mask`


def no_masks(given: Batch) -> None:
    """The positions alone keep documents apart."""


def masks(model: PreTrainedModel) -> Masks:
    """The attention masks that keep documents apart in this model; None where the positions do it, as they should.

    transformers finds in the positions where documents begin. Some models (gpt-oss) do not hand the positions on to
    where masks are made: they get theirs from here. Raises TrainingError for a model in which neither helps.
    """
    if apart(model, no_masks):
        return no_masks

    def by_layer(given: Batch) -> AttentionMask:
        return _by_layer(model, given)

    kinds = getattr(text_config(model), "layer_types", None)
    if kinds and set(kinds) <= _makers().keys() and apart(model, by_layer):
        return by_layer
    raise TrainingError(
        f"In {type(model).__name__} a document sees the one before it in its row, whatever its positions say: "
        "give --no-pack."
    )


def apart(model: PreTrainedModel, found: Masks) -> bool:
    """Whether the loss of a document has a gradient of exactly zero with respect to the one before it."""
    vocabulary = text_config(model).vocab_size
    some = [Document([k % vocabulary for k in range(first, first + 4)], [True] * 4) for first in (0, 4)]
    probe, met = batch([some], pad=0).to(model.device), list[Tensor]()

    def cut_off(module: nn.Module, arguments: object, out: Tensor) -> Tensor:
        met.append(out.detach().requires_grad_())
        return met[-1]

    handle = model.get_input_embeddings().register_forward_hook(cut_off)
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            logits = model(
                input_ids=probe.input_ids,
                position_ids=probe.position_ids,
                attention_mask=found(probe),
                use_cache=False,
            ).logits
            (gradient,) = torch.autograd.grad(logits[:, 4:].float().square().sum(), met)
    finally:
        handle.remove()
        model.train(training)
    seen = gradient[0, :4]
    return not bool((seen.isfinite() & (seen != 0)).any())


def _makers() -> dict[str, Callable[..., object]]:
    from transformers import masking_utils

    return {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
        "chunked_attention": masking_utils.create_chunked_causal_mask,
    }


def _by_layer(model: PreTrainedModel, given: Batch) -> dict[str, object]:
    """The masks of each kind of layer, made by transformers' own functions, with the positions."""
    config = text_config(model)
    like = torch.empty(*given.input_ids.shape, 0, dtype=model.dtype, device=given.input_ids.device)
    known: dict[str, object] = {"config": config, "inputs_embeds": like, "attention_mask": None}
    known |= {"past_key_values": None, "position_ids": given.position_ids}
    return {kind: _makers()[kind](**known) for kind in dict.fromkeys(config.layer_types)}
