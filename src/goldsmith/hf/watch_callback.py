"""WatchCallback: `assay.watch` inside transformers' Trainer."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..assay import Event
    from ..assay.nonfinite.norms import Norm
    from ..assay.nonfinite.watch import Watch


class WatchCallback(TrainerCallback):
    """Finds the first NaN or Inf of a run of `Trainer`, or of any trainer built on it, with `assay.watch`.

    every   watch the steps 1, 1 + every, 1 + 2 every, ...; in all other steps nothing is hooked and nothing is slower
    norms   keep norm, absmax and share of zeros of every module's outputs and of every gradient, for the watched steps
    stop    raise assay.NonFinite, before the optimizer's step where the watch already knows. Otherwise one
            RuntimeWarning with the event's text, and training goes on
    sync    as in `assay.watch`

    `first` is the first Event, or None; `events` are those of its step; `rows` are the norms. Steps have Trainer's own
    numbers, from 1, as in its logs. A step is a step of the optimizer, with all its micro-batches. The watch ends with
    the step that has the first event. If an exception leaves `train()` in the middle of a watched step, call
    `close()`; the next `train()` does so too. Each process watches its own part of the batch.

    Raises TypeError and ValueError for a wrong argument.
    """

    def __init__(self, every: int = 1, *, norms: bool = False, stop: bool = False, sync: bool = True) -> None:
        from ..assay import watch

        watch(norms=norms, every=every, stop=stop, sync=sync)  # checks the arguments
        self.every, self.norms, self.stop, self.sync = every, norms, stop, sync
        self._watch: Watch | None = None  # one for all steps: only in its first does it judge every operator
        self._inside = False
        self._steps: list[int] = []  # Trainer's numbers of the watched steps
        self._reset()

    def _reset(self) -> None:
        self.events: list[Event] = []
        self.rows: list[Norm] = []

    @property
    def first(self) -> Event | None:
        """The first event, or None."""
        return self.events[0] if self.events else None

    def close(self) -> None:
        """Ends the watch of the current step, if there is one, and keeps its events and norms."""
        if self._watch is None or not self._inside:
            return
        self._inside = False
        try:
            self._watch.step()
        finally:
            self._watch.__exit__(None, None, None)
        self.events = [replace(event, step=self._steps[event.step]) for event in self._watch.events]
        self.rows += [replace(row, step=self._steps[row.step]) for row in self._watch.rows[len(self.rows) :]]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.close()
        self._watch = None
        self._steps.clear()
        self._reset()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        if self.events or state.global_step % self.every:
            return
        from ..assay import watch

        model: nn.Module = kwargs["model"]
        self._steps.append(state.global_step + 1)
        if self._watch is None:
            self._watch = watch(model, norms=self.norms, sync=self.sync)
            self._watch.by_hand = True  # a step has several calls if batches are accumulated
        self._watch.__enter__()
        self._inside = True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.stop and self._inside and self._watch is not None and self._watch.events:
            self._end()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._end()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._end()

    def _end(self) -> None:
        if not self._inside:
            return
        self.close()
        if self.first is None:
            return
        if self.stop:
            from ..assay import NonFinite

            raise NonFinite(self.first)
        warnings.warn(str(self.first), RuntimeWarning, stacklevel=2)
