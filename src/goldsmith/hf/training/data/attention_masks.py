"""Keeps the documents in a packed row from attending to each other, verified on each model by a gradient."""

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


def no_masks(inputs: Batch) -> None:
    """No mask: the positions alone keep documents apart."""


def masks(model: PreTrainedModel, length: int = 512) -> Masks:
    """A function that makes the attention masks that keep documents apart in this model; None if positions suffice.

    transformers infers from the positions where documents begin. Some models (gpt-oss) do not pass the positions to the
    code that makes masks, so they get their masks from here. Each method is tried on a row of `length` tokens, the
    run's own, because a model may mix what is far apart: DeepSeek-V4 compresses 128 tokens into one. Raises
    TrainingError if neither method works.
    """
    if keeps_apart(model, no_masks, length):
        return no_masks

    def by_layer(inputs: Batch) -> AttentionMask:
        return _by_layer(model, inputs)

    kinds = getattr(text_config(model), "layer_types", None)
    if kinds and set(kinds) <= _mask_functions().keys() and keeps_apart(model, by_layer, length):
        return by_layer
    raise TrainingError(
        f"In {type(model).__name__} a document attends to the one before it in its row, whatever its positions are: "
        "give --no-pack."
    )


def keeps_apart(model: PreTrainedModel, masks: Masks, length: int = 512) -> bool:
    """Whether no document of a packed row influences a later one: the gradients are exactly zero.

    Tried on a short row, whose documents are shorter than any window, and on one of `length` tokens.
    """
    return all(_row_keeps_apart(model, masks, lengths) for lengths in ((4, 4), _three_documents(length)))


def _three_documents(length: int) -> tuple[int, ...]:
    """Three documents that begin at odd places, so that they share blocks of any size with their neighbours."""
    first = max(2, length * 3 // 8 | 1)
    second = max(2, length * 2 // 8 | 1)
    return first, second, max(2, length - first - second)


def _row_keeps_apart(model: PreTrainedModel, masks: Masks, lengths: tuple[int, ...]) -> bool:
    vocabulary = text_config(model).vocab_size
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    documents = [
        Document([k % vocabulary for k in range(start, start + size)], [True] * size)
        for start, size in zip(starts, lengths)
    ]
    probe, embeddings = batch([documents], pad=0).to(model.device), list[Tensor]()

    def cut_off(module: nn.Module, arguments: object, out: Tensor) -> Tensor:
        embeddings.append(out.detach().requires_grad_())
        return embeddings[-1]

    handle = model.get_input_embeddings().register_forward_hook(cut_off)
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            logits = model(
                input_ids=probe.input_ids,
                position_ids=probe.position_ids,
                attention_mask=masks(probe),
                use_cache=False,
            ).logits
            for start in starts[1:]:
                loss = logits[:, start:].float().square().sum()
                (gradient,) = torch.autograd.grad(loss, embeddings[:1], retain_graph=True)
                leaked = gradient[0, :start]
                if bool((leaked.isfinite() & (leaked != 0)).any()):
                    return False
    finally:
        handle.remove()
        model.train(training)
    return True


def _mask_functions() -> dict[str, Callable[..., object]]:
    from transformers import masking_utils

    return {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
        "chunked_attention": masking_utils.create_chunked_causal_mask,
    }


def _by_layer(model: PreTrainedModel, inputs: Batch) -> dict[str, object]:
    """The masks for each kind of layer, made from the positions by transformers' own functions."""
    config = text_config(model)
    like = torch.empty(*inputs.input_ids.shape, 0, dtype=model.dtype, device=inputs.input_ids.device)
    arguments: dict[str, object] = {"config": config, "inputs_embeds": like, "attention_mask": None}
    arguments |= {"past_key_values": None, "position_ids": inputs.position_ids}
    return {kind: _mask_functions()[kind](**arguments) for kind in dict.fromkeys(config.layer_types)}
