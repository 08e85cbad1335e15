"""The summed loss of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .packing import UNTRAINED, Batch


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """-sum log p(token i | tokens of its own document before i), over the tokens that count; a scalar.

    No attention mask is given: transformers reads from the positions where documents begin, and keeps them apart. The
    vocabulary's logits are made only at places where some row has a token that counts.
    """
    counts = batch.labels[:, 1:] != UNTRAINED
    places = counts.any(0).nonzero().flatten()
    out = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, logits_to_keep=places
    ).logits
    if not places.numel():
        return out.sum() * 0.0
    logits = out.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, batch.labels[:, places + 1].flatten(), ignore_index=UNTRAINED, reduction="sum")
