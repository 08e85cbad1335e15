"""NativeRows: texts that step together in the native step, each with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import DynamicCache

from ...offload.decoding.cache import SequenceCache
from ..offload.stepping import StepForward
from .rows import Rows
from .running_text import RunningText

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def native_forward(model: PreTrainedModel) -> StepForward | None:
    """The model's native step for sequences that come and go, if it may have one."""
    forward = model.__dict__.get("forward")
    return forward if type(forward) is StepForward else None


class NativeRows:
    """Rows whose logits depend on no other row: who joins or leaves moves no cache and changes no bit."""

    broken = False

    def __init__(self, texts: Sequence[RunningText], caches: Sequence[SequenceCache], forward: StepForward) -> None:
        self.texts, self._caches, self._forward = list(texts), list(caches), forward

    @classmethod
    def of(cls, rows: Rows, model: PreTrainedModel) -> NativeRows | None:
        """A text after its prompt; None if the native step does not compute the model as it is now."""
        forward, (text,) = native_forward(model), rows.texts
        cache = None if forward is None else forward.sequence(rows.cache, text.request.tokens)
        return None if forward is None or cache is None else cls([text], [cache], forward)

    @property
    def adapter(self) -> str | None:
        return self.texts[0].request.adapter

    @property
    def ready(self) -> bool:
        """Whether the native step computes the model as it is now."""
        return self._forward.ready(1)

    def step(self, model: PreTrainedModel) -> Tensor:
        """The logits [rows, vocabulary] after one more token of every row. `ready` was True."""
        self._rewind()
        return self._forward.step_sequences([text.ids[-1] for text in self.texts], self._caches)

    def join(self, other: NativeRows) -> None:
        """Adds the rows of another batch."""
        self.texts += other.texts
        self._caches += other._caches

    def keep(self, texts: Sequence[RunningText]) -> None:
        """Drops all rows but those of these texts."""
        kept = [row for row, text in enumerate(self.texts) if any(text is one for one in texts)]
        self.texts, self._caches = [self.texts[row] for row in kept], [self._caches[row] for row in kept]

    def separate(self) -> list[NativeRows]:
        """Every row as a batch of its own."""
        pairs = zip(self.texts, self._caches, strict=True)
        return [NativeRows([text], [cache], self._forward) for text, cache in pairs]

    def plain(self) -> Rows:
        """The same rows for the model's own forward."""
        self._rewind()
        batches = []
        for text, sequence in zip(self.texts, self._caches, strict=True):
            cache = DynamicCache()
            for layer, (keys, values) in enumerate(sequence.tensors()):
                cache.update(keys[None], values[None], layer)
            batches.append(Rows([text], cache))
        whole, *others = batches
        for rows in others:
            whole.join(rows)
        return whole

    def _rewind(self) -> None:
        """Drops the position that a step which failed may have counted."""
        for text, cache in zip(self.texts, self._caches, strict=True):
            cache.length = len(text.ids) - 1
