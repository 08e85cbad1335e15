"""Whether this thread records a step: then an engine's calls launch work of the recording instead of running."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class Recorded(Protocol):
    """The experts of one engine in a recording."""

    @property
    def engine(self) -> object: ...
    def call(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...


_RECORDED: ContextVar[Recorded | None] = ContextVar("goldsmith_recorded", default=None)
begin_recording, end_recording = _RECORDED.set, _RECORDED.reset


def recorded(engine: object) -> Recorded | None:
    """The experts of this engine, if this thread records a step of it."""
    experts = _RECORDED.get()
    return experts if experts is not None and experts.engine is engine else None
