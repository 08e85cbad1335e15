"""Streams and events with the same interface on a CPU and on a GPU.

    stream.run(work)      does `work` after all earlier work
    stream.wait(event)    delays later work until the event has happened
    stream.record()       an event that happens when all earlier work is done
    event.synchronize()   blocks the calling thread; raises the error of the work before the event

On a CPU the compute stream is the caller's thread (`Inline`) and copies have their own thread (`Worker`), so that slots
and events can be tested without a GPU. No code looks streams up: each function receives the stream it needs.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], object]


class StreamEvent(Protocol):
    def synchronize(self) -> None: ...


class WorkStream(Protocol):
    def run(self, work: Work) -> None: ...
    def wait(self, event: StreamEvent) -> None: ...
    def record(self) -> StreamEvent: ...


class Done:
    """An event that has already happened."""

    done = True

    def synchronize(self) -> None:
        pass


DONE = Done()


class Inline:
    """The calling thread: work is done at once."""

    def run(self, work: Work) -> None:
        work()

    def wait(self, event: StreamEvent) -> None:
        event.synchronize()

    def record(self) -> Done:
        return DONE


class HostEvent:
    """An event that a Worker sets; it carries the exception of the work before it to the thread that waits."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self.error: BaseException | None = None

    def happened(self, error: BaseException | None) -> None:
        self.error = error
        self._set.set()

    @property
    def done(self) -> bool:
        return self._set.is_set()

    def synchronize(self) -> None:
        self._set.wait()
        if self.error is not None:
            raise self.error


class Worker:
    """A thread that does work in order. It starts with the first work; `close` ends it and may be called twice.

    It is a daemon and holds no reference to its owner, so a program that forgets to close it still exits.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._finalizer = weakref.finalize(self, self._queue.put, None)
        self._finalizer.atexit = False

    def run(self, work: Work) -> None:
        self._put(("run", work))

    def wait(self, event: StreamEvent) -> None:
        if event is not DONE:
            self._put(("wait", event))

    def record(self) -> HostEvent | Done:
        if self._thread is None and not self._closed:
            return DONE  # no work, so nobody needs to be woken
        event = HostEvent()
        self._put(("event", event))
        return event

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _put(self, item: tuple[str, Work | StreamEvent]) -> None:
        if self._closed:
            raise ValueError(f"{self._name}: is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(item)


def _serve(items: queue.SimpleQueue[Any]) -> None:
    failed: BaseException | None = None  # until an event has carried it to a waiting thread
    while (item := items.get()) is not None:
        kind, task = item
        if kind == "event":
            task.happened(failed)
            failed = None
        elif failed is None:
            try:
                with torch.inference_mode():
                    task() if kind == "run" else task.synchronize()
            except BaseException as error:  # noqa: BLE001  raised again by the event that follows
                failed = error
        del item, task


class CudaStream:
    """A torch stream of a CUDA device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def wait(self, event: Any) -> None:
        if event is not DONE:
            self.stream.wait_event(event)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


class CopyStream(CudaStream):
    """A stream whose work passes it explicitly, so it need not be made current (which takes 15 us)."""

    def run(self, work: Work) -> None:
        work()


class CurrentStream(CudaStream):
    """The stream that was current at creation; valid while it stays current, because work is not redirected to it."""

    def run(self, work: Work) -> None:
        work()
