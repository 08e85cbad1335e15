"""GraphStep: logits of the next token of each sequence, by one recording of the whole step on the engine's device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    tokens   [rows, 1]; positions [rows, 1]: of the tokens in their own sequences
    last     [1]: the position of the tokens in the cache; starts [rows]: where each sequence begins there
    """

    tokens: Tensor
    positions: Tensor
    last: Tensor
    starts: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


Run = Callable[[StepInputs], Tensor]


class GraphStep:
    """logits [rows, vocabulary] = step(tokens [rows], cache): computes the tokens' layers and appends them to the cache

    next(tokens, cache) -> the same in float32 as a part of the recording, which the next step overwrites
    run(inputs) -> logits computes the model with the engine's experts; it is recorded, and runs again with every step.
    experts_per_token, dtype: of the model. Raises NotFinite unless guard="off". Not for several threads at once.
    """

    def __init__(self, engine: Engine, run: Run, experts_per_token: int, dtype: torch.dtype) -> None:
        self.engine, self._run, self._k, self._dtype = engine, run, experts_per_token, dtype
        self.experts: GraphExperts | None = None
        self.recording: RecordedStep | None = None

    def __call__(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """The logits of the tokens' successors, in the model's dtype."""
        return self.engine.exclusively(self._cloned, tokens, cache)

    def next(self, tokens: Tensor, cache: StepCache) -> Tensor:
        return self.engine.exclusively(self._step, tokens, cache).wide

    def best(self, logits: Tensor) -> list[int] | None:
        """The token of each row with the largest of these logits, if they are what `next` gave last."""
        recording = self.recording
        return recording.best.tolist() if recording is not None and logits is recording.wide else None

    def _cloned(self, tokens: Tensor, cache: StepCache) -> Tensor:
        return self._step(tokens, cache).logits.clone()

    def _step(self, tokens: Tensor, cache: StepCache) -> RecordedStep:
        cache.reserve(cache.length + 1)
        recording = self.recording
        if self.experts is not None and self.experts.lora is not self.engine.adapters.lora:
            self.close()
            recording = None
        if recording is None or not recording.continues(cache):
            recording = self._record(cache)
        recording.step(tokens, cache)
        return recording

    def _record(self, cache: StepCache) -> RecordedStep:
        if self.experts is None or self.experts.tokens != cache.rows:
            self.close()
            self.experts = GraphExperts(self.engine, cache.rows, self._k, self._dtype)
            self.engine.steps.append(self)
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.close()
        self.recording = RecordedStep(self.experts, self._run, cache)
        return self.recording

    def settle(self) -> None:
        """Adds what the steps have counted to the engine's counters."""
        if self.experts is not None:
            self.experts.settle()

    def close(self) -> None:
        """Frees the recording; the next step records again."""
        recording, experts, self.recording, self.experts = self.recording, self.experts, None, None
        if recording is not None:
            recording.close()
        if experts is not None:
            experts.settle()
            experts.close()
            self.engine.steps.remove(self)


class RecordedStep:
    """A recording over the buffers of one cache; later it may take over another cache, if the first one is gone

    logits, wide   of the last step: in the model's dtype, and in float32; the next step overwrites them
    best           the tokens with the largest logits, on the host
    """

    logits: Tensor
    wide: Tensor

    def __init__(self, experts: GraphExperts, run: Run, cache: StepCache) -> None:
        rows, device = cache.rows, experts.machine.device
        self.experts, self._capacity, self._cache = experts, cache.capacity, weakref.ref(cache)
        self._guarded = experts.engine.settings.guard != "off"
        with torch.inference_mode(False):
            here = experts.host((2 * rows + 1,), torch.int64)  # tokens, the cache's length, positions
            there = torch.zeros(2 * rows + 1, dtype=torch.int64, device=device)
            finite_here = experts.host((1,), torch.bool)
            finite_there = torch.zeros(1, dtype=torch.bool, device=device)
            best_here = experts.host((rows,), torch.int64)
        self._numbers, self._finite, self.best = here.numpy(), finite_here.numpy(), best_here.numpy()
        self._starts = cache.starts.numpy()
        self.inputs = StepInputs(
            there[:rows].view(rows, 1), there[rows + 1 :].view(rows, 1), there[rows : rows + 1],
            cache.starts.to(device, copy=True), tuple(cache.keys), tuple(cache.values),
        )  # fmt: skip
        self._numbers[rows] = cache.length  # the rehearsal writes where the step will

        def work() -> None:
            there.copy_(here, non_blocking=True)
            token = begin_recording(experts)
            try:
                with torch.no_grad():
                    self.logits = run(self.inputs)
                    self.wide = self.logits.float()
                    best_here.copy_(self.wide.argmax(-1), non_blocking=True)
            finally:
                end_recording(token)
            if self._guarded:
                finite_there.copy_(torch.isfinite(self.logits).all())
                finite_here.copy_(finite_there, non_blocking=True)

        self._served, self._under_way = 0, False  # steps served before the last launch, and whether it may still run
        self._work = experts.machine.record(work, lambda: experts.rehearse(work))
        experts.forget_rehearsal()

    def continues(self, cache: StepCache) -> bool:
        """Whether this recording is one of the cache; moves the cache into its buffers if they are free."""
        now = self._cache()
        if now is cache and self._capacity == cache.capacity:
            return True
        self.end()
        if now is not None or cache.rows != len(self._starts) or cache.capacity > self._capacity:
            return False
        for there, own in ((self.inputs.keys, cache.keys), (self.inputs.values, cache.values)):
            for i, buffer in enumerate(there):
                buffer[:, :, : cache.length] = own[i][:, :, : cache.length]
                own[i] = buffer
        self.inputs.starts.copy_(cache.starts)
        self._starts, cache.capacity, self._cache = cache.starts.numpy(), self._capacity, weakref.ref(cache)
        return True

    def step(self, tokens: Tensor, cache: StepCache) -> None:
        """Sets `logits`, `wide` and `best`, and appends the tokens to the cache. Raises NotFinite."""
        if self._under_way:
            self.end()
        rows, experts, serving = cache.rows, self.experts, self.experts.serving
        self._numbers[:rows] = tokens.reshape(-1).tolist()
        self._numbers[rows] = cache.length
        self._numbers[rows + 1 :] = cache.length - self._starts
        experts.load()
        self._served, self._under_way = 0 if serving is None else serving.served, True
        try:
            self._work.launch()
            if serving is not None:
                serving.serve()
        finally:
            self.end()
        fine = experts.finish()
        if self._guarded and not (fine and self._finite[0]):
            raise NotFinite("a step's numbers are not finite")
        cache.advance()

    def end(self) -> None:
        """Waits until the device has done the last step, which it serves first if an exception came in between.

        Python raises KeyboardInterrupt after any instruction, so a step may be launched and not served; then the
        device would wait forever. A second one may come here; the next call goes on.
        """
        if not self._under_way:
            return
        serving = self.experts.serving
        if serving is not None:
            while serving.served == self._served and not self._work.idle():
                if serving.asked:
                    serving.serve()
        try:
            self._work.wait()
        except Exception:  # of the device's work, which has ended with it
            self._under_way = False
            raise
        self._under_way = False

    def close(self) -> None:
        self.end()
        self._work.close()
