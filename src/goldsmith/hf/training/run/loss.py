"""The summed loss of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.attention_masks import Masks, no_masks
from ..data.packing import UNTRAINED, Batch
from ..errors import TrainingError


def summed_loss(model: nn.Module, batch: Batch, masks: Masks = no_masks) -> Tensor:
    """-sum log p(token i | earlier tokens of its document), over all trained tokens; a scalar.

    `masks` keep documents apart if their positions alone do not (see `attention_masks`). Logits are computed only at
    places where at least one row has a trained token.
    """
    counts = batch.labels[:, 1:] != UNTRAINED
    places = counts.any(0).nonzero().flatten()
    out = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=masks(batch),
        use_cache=False,
        logits_to_keep=places,
    ).logits
    if not places.numel():
        return out.sum() * 0.0
    if out.shape[1] != places.numel():
        if out.shape[1] != batch.input_ids.shape[1]:
            raise TrainingError(
                f"{type(model).__name__} gives logits of {out.shape[1]} positions for {batch.input_ids.shape[1]} "
                "tokens: it does not predict the next token, and this command trains only models that do."
            )
        out = out[:, places]  # a model that does not know `logits_to_keep`
    logits = out.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, batch.labels[:, places + 1].flatten(), ignore_index=UNTRAINED, reduction="sum")
