"""CandidateSide: what a candidate's process knows of a target. It has the candidate, and no golden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...declare.binding import Bound, bind
from ...declare.target import wanted_grads


@dataclass(frozen=True)
class Parts:
    """The callables of a candidate, and what judges want to know about them.

    remarks: sentences that an author of a wrong candidate wants to read
    """

    candidate: Callable
    backward: Callable | None = None
    reset: Callable[[], object] | None = None
    bindings: dict[tuple[str, tuple[str, ...]], Bound] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CandidateSide:
    """A target without golden and cases, for runs of its candidate in this process."""

    parts: Parts
    outputs: tuple[str, ...] | None
    saved: tuple[str, ...]
    grads: tuple[str, ...] | None
    mutates: tuple[str, ...]
    backward: Callable | str | None
    runner: None = None

    def __post_init__(self) -> None:
        if self.backward == "own":
            object.__setattr__(self, "backward", self.parts.backward)

    @property
    def reset(self) -> Callable[[], object] | None:
        return self.parts.reset

    def bound(self, argument: str, supply: Mapping[str, object]) -> Bound:
        key = (argument, tuple(supply))
        if key not in self.parts.bindings:
            self.parts.bindings[key] = bind(argument, getattr(self.parts, argument), supply)
        return self.parts.bindings[key]

    def wanted_grads(self, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
        return wanted_grads(self.grads, inputs)
