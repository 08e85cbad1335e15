"""A recording of what each lane did when, for Chrome's trace viewer and Perfetto."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LANES = ("call", "cpu", "link", "device", "merge")


class Trace:
    """Spans while recording: Chrome's `ph: "X"` events in microseconds, one named thread for each lane."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] | None = None
        self._begin = 0.0

    @property
    def on(self) -> bool:
        return self._events is not None

    def span(self, lane: str, name: str, begin: float, end: float, **args: object) -> None:
        """Records that a lane worked from `begin` to `end`, times of time.perf_counter()."""
        if self._events is not None:
            event = {"name": name, "ph": "X", "pid": os.getpid(), "tid": LANES.index(lane), "args": args}
            self._events.append(event | {"ts": (begin - self._begin) * 1e6, "dur": max(0.0, end - begin) * 1e6})

    @contextmanager
    def recording(self, path: str | os.PathLike[str], settle: Callable[[], None]) -> Iterator[None]:
        """Records the block's spans and writes them to the file at the end, even if the block raises

        Calls `settle` at the beginning and end, which waits for work under way. Work from before is not recorded.
        Raises ValueError if a recording is already running.
        """
        if self.on:
            raise ValueError("offload.Engine.trace: a trace is being recorded already; end it first")
        path = Path(path)
        path.write_text("")  # report a missing folder before the work, not after it
        settle()
        self._events, self._begin = [], time.perf_counter()
        try:
            try:
                yield
            finally:
                settle()
        finally:
            events, self._events = self._events, None
            names = [
                {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": i, "args": {"name": lane}}
                for i, lane in enumerate(LANES)
            ]
            try:
                path.write_text(json.dumps({"traceEvents": names + (events or []), "displayTimeUnit": "ms"}))
            except OSError as error:  # the error of a full disk names no file
                raise OSError(error.errno, error.strerror, str(path)) from error
