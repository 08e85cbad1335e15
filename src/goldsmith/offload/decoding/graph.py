"""GraphStep: logits of the next token of each sequence, by one recording of the whole step on the engine's device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine import Engine
from .cache import StepCache
from .graph_experts import GraphExperts
from .recording import begin_recording, end_recording


class NotFinite(ArithmeticError):
    """A step's numbers are not finite, or a router gave an expert that does not exist; the cache is as before."""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a step reads and where it writes: the same tensors in every launch

    tokens      [rows, 1]; positions [rows, 1]: of the tokens in their own sequences
    last        [1]: the position of the tokens in the cache; starts [rows]: where each sequence begins there
    """

    tokens: Tensor
    positions: Tensor
    last: Tensor
    starts: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class GraphStep:
    """logits [rows, vocabulary] = step(tokens [rows], cache): computes the tokens' layers and appends them to the cache

    run(inputs) -> logits computes the model with the engine's experts; it is recorded, and runs again with every step.
    experts_per_token, dtype: of the model. Raises NotFinite if `guarded`. Not for several threads at once.
    """

    def __init__(
        self, engine: Engine, run: Callable[[StepInputs], Tensor], experts_per_token: int, dtype: torch.dtype
    ) -> None:
        self.engine, self._run, self._k, self._dtype = engine, run, experts_per_token, dtype
        self._cache: weakref.ref[StepCache] | None = None
        self._rows, self._capacity = -1, -1
        self._experts: GraphExperts | None = None
        self._recording: Any = None
        self.guarded = engine.settings.guard != "off"

    def __call__(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """The logits of the tokens' successors, in the model's dtype."""
        cache.reserve(cache.length + 1)
        return self.engine.exclusively(self._step, tokens, cache)

    def _step(self, tokens: Tensor, cache: StepCache) -> Tensor:
        if self._cache is None or self._cache() is not cache or self._capacity != cache.capacity:
            if not self._moved(cache):
                self._record(cache)
        experts, recording = self._experts, self._recording
        self._host[: self._rows] = tokens.view(-1)
        self._numbers[self._rows] = cache.length
        self._numbers[self._rows + 1 :] = cache.length - self._starts
        experts.load()
        recording.launch()
        try:
            if experts.asks:
                experts.serve()
        finally:
            recording.wait()
        fine = experts.finish()
        if self.guarded and not (fine and self._finite[0]):
            raise NotFinite("a step's numbers are not finite")
        cache.length += 1
        return self._logits.clone()

    def _moved(self, cache: StepCache) -> bool:
        """Moves another cache into the buffers of the recording, if they are free and large enough."""
        free = self._cache is not None and self._cache() is None and self._recording is not None
        if not free or cache.rows != self._rows or cache.capacity > self._capacity:
            return False
        inputs = self._inputs
        for there, own in ((inputs.keys, cache.keys), (inputs.values, cache.values)):
            for i, buffer in enumerate(there):
                buffer[:, :, : cache.length] = own[i][:, :, : cache.length]
                own[i] = buffer
        inputs.starts.copy_(cache.starts)
        self._starts, cache.capacity = cache.starts.numpy(), self._capacity
        self._cache = weakref.ref(cache)
        return True

    def _record(self, cache: StepCache) -> None:
        """Records the step over the buffers of this cache."""
        self._close_recording()
        if cache.rows != self._rows:
            self.close()
            self._experts = GraphExperts(self.engine, cache.rows, self._k, self._dtype)
            self.engine.steps.append(self)
            self._rows = cache.rows
            self._allocate(self._experts)
        experts, rows = self._experts, self._rows
        there = self._there
        self._starts = cache.starts.numpy()
        inputs = StepInputs(
            there[:rows].view(rows, 1), there[rows + 1 :].view(rows, 1), there[rows : rows + 1],
            cache.starts.to(there.device, copy=True), tuple(cache.keys), tuple(cache.values),
        )  # fmt: skip
        self._inputs = inputs
        self._numbers[rows] = cache.length  # the rehearsal writes where the step will

        def run() -> None:
            there.copy_(self._host, non_blocking=True)
            token = begin_recording(experts)
            try:
                with torch.no_grad():
                    logits = self._run(inputs)
            finally:
                end_recording(token)
            self._logits = logits
            if self.guarded:
                self._finite_there.copy_(torch.isfinite(logits).all())
                self._finite_here.copy_(self._finite_there, non_blocking=True)

        self._recording = experts.machine.record(run, lambda: experts.rehearse(run))
        experts.forget_rehearsal()
        self._cache, self._capacity = weakref.ref(cache), cache.capacity

    def _allocate(self, experts: GraphExperts) -> None:
        with torch.inference_mode(False):
            self._host = experts.host((2 * self._rows + 1,), torch.int64)
            self._there = torch.zeros(2 * self._rows + 1, dtype=torch.int64, device=experts.machine.device)
            self._finite_here = experts.host((1,), torch.bool)
            self._finite_there = torch.zeros(1, dtype=torch.bool, device=experts.machine.device)
        self._numbers, self._finite = self._host.numpy(), self._finite_here.numpy()

    def _close_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()

    def settle(self) -> None:
        """Adds what the steps have counted to the engine's counters."""
        if self._experts is not None:
            self._experts.settle()

    def close(self) -> None:
        """Frees the recording; the next step records again."""
        self._close_recording()
        experts, self._experts, self._cache, self._rows = self._experts, None, None, -1
        if experts is not None:
            experts.settle()
            experts.close()
            self.engine.steps.remove(self)
