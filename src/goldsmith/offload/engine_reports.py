"""EngineReports: what an engine has counted, in numbers and in words."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .engine_lock import EngineLock, Result
from .explanation import Explanation, explain
from .lanes.device_lanes import DeviceLanes
from .lanes.direct import DirectCalls
from .memory.cache import Cache
from .observe.statistics import Counts, Stats
from .observe.trace import Trace


class CountedStep(Protocol):
    """A recorded step over the engine's experts."""

    def settle(self) -> None: ...
    def close(self) -> None: ...


class EngineReports:
    """The reports of an Engine, which sets the attributes below."""

    direct: DirectCalls | None
    _lock: EngineLock
    _lanes: Any
    _caches: Mapping[int, Cache]
    _tallies: defaultdict[int, Counts]
    _trace: Trace
    _transport: tuple[str, str]
    _runs_ahead: bool
    _number: int
    steps: list[CountedStep]  # recorded steps, which count by themselves

    @property
    def device_lanes(self) -> DeviceLanes | None:
        """The lanes with a GPU; None if the engine takes no memory there."""
        return self._lanes if isinstance(self._lanes, DeviceLanes) else None

    @property
    def caches(self) -> Mapping[int, Cache]:
        return self._caches

    @property
    def calls(self) -> int:
        """Calls so far, which may have changed the caches."""
        return self._number

    def tally(self, layer: int) -> Counts:
        return self._tallies[layer]

    def exclusively(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Returns work(*arguments) while no other thread uses the engine."""
        self._check()
        return self._lock.take(work, *arguments)

    def stats(self) -> Stats:
        """Counters since the engine was created, or since reset_stats(): totals and `.layers[layer]`.

        In a forked process: the counters from before the fork.
        """
        self._count_all()
        return Stats.of(self._tallies)

    def reset_stats(self) -> None:
        self._count_all()
        self._tallies.clear()

    def _count_all(self) -> None:
        """Waits for work that is not counted yet, and counts it."""
        if not self._lock.forked:
            self.flush()
        if self.direct is not None:
            self.direct.settle()
        for step in self.steps:
            step.settle()

    def explain(self) -> Explanation:
        """Budget, lanes, costs, thresholds and bottlenecks, in words; `to_dict()` for programs."""
        return explain(self)  # type: ignore[arg-type]  # an Engine, which has the rest

    @property
    def runs_ahead(self) -> bool:
        """Whether a call may return before the CPU has finished it (like work on a GPU)."""
        return self._runs_ahead

    @property
    def transport(self) -> tuple[str, str]:
        """How experts reach the device ("registered", "ring", "memory"), and the reason."""
        return self._transport

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """`with engine.trace("t.json"):` records what every lane does in the block, for Chrome's trace viewer."""
        self._check()
        return self._trace.recording(path, self._settle)

    def profile(self) -> dict[str, dict[str, list[int]]]:
        """{"counts": {layer: calls that used each expert}} so far, ready for JSON: the input of cache="static"."""
        if self.direct is not None:
            self.direct.settle()
        for step in self.steps:
            step.settle()
        return {"counts": {str(layer): cache.profile for layer, cache in self._caches.items()}}

    def flush(self) -> None:
        """Waits for work under way, and raises what the guard found in it; call it at the end of a model's forward."""
        self._lock.take_if_open(lambda: self._lanes.flush())

    def _settle(self) -> None:
        if not self._lock.forked:
            self._lock.take_if_open(lambda: self._lanes.settle())

    def _check(self) -> None:
        """Raises if the engine cannot be used now."""
        self._lock.check()
