"""The summed loss of a batch, and the metrics of held-out data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.attention_masks import Masks, no_masks
from ..data.packing import UNTRAINED, Batch
from ..errors import TrainingError


@dataclass(frozen=True)
class Evaluation:
    """The losses of all target tokens added up, and the number of tokens that the model finds most likely."""

    summed_loss: float
    hits: int
    targets: int

    @property
    def loss(self) -> float:
        """The mean loss of a token, in nats."""
        return self.summed_loss / self.targets

    @property
    def perplexity(self) -> float:
        """exp(loss); Inf beyond the largest float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def accuracy(self) -> float:
        """The share of target tokens to which the model gives the largest logit."""
        return self.hits / self.targets


def loss_and_hits(model: nn.Module, batch: Batch, masks: Masks = no_masks) -> tuple[float, int]:
    """The summed loss, and the number of trained tokens to which the model gives the largest logit."""
    logits, labels = _logits_and_labels(model, batch, masks)
    if labels.numel() == 0:
        return 0.0, 0
    return float(_cross_entropy(logits, labels)), int((logits.argmax(-1) == labels).sum())


def summed_loss(model: nn.Module, batch: Batch, masks: Masks = no_masks) -> Tensor:
    """-sum log p(token i | earlier tokens of its document), over all trained tokens; a scalar.

    `masks` keep documents apart if their positions alone do not (see `attention_masks`). Logits are computed only at
    places where at least one row has a trained token.
    """
    logits, labels = _logits_and_labels(model, batch, masks)
    return _cross_entropy(logits, labels) if labels.numel() else logits.sum() * 0.0


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=UNTRAINED, reduction="sum")


def _logits_and_labels(model: nn.Module, batch: Batch, masks: Masks) -> tuple[Tensor, Tensor]:
    """The logits [predictions, vocabulary] in float32 or better, and the token that follows each."""
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
        return out, batch.labels[:, places + 1].flatten()
    if out.shape[1] != places.numel():
        if out.shape[1] != batch.input_ids.shape[1]:
            raise TrainingError(
                f"{type(model).__name__} gives logits of {out.shape[1]} positions for {batch.input_ids.shape[1]} "
                "tokens: it does not predict the next token, and this command trains only models that do."
            )
        out = out[:, places]  # a model that does not know `logits_to_keep`
    logits = out.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits, batch.labels[:, places + 1].flatten()
