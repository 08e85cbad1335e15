"""Streams and events with one meaning on a CPU and on a GPU: work in order, marks in it, and waiting for a mark.

    stream.run(work)      does `work` after what was given before
    stream.wait(event)    what is given from now on begins after the event
    stream.record()       an event that has happened when all that was given before is done
    event.synchronize()   the calling thread waits; raises what went wrong in the work before it

On a CPU the compute stream is the caller's thread (`Inline`) and copies have a thread of their own (`Worker`), so that
slots and their events are tried without a GPU. No stream is looked up: whoever needs one is handed it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], Any]


class Event(Protocol):
    def synchronize(self) -> None: ...


class Stream(Protocol):
    def run(self, work: Work) -> None: ...
    def wait(self, event: Any) -> None: ...
    def record(self) -> Any: ...


class Done:
    """An event that has happened."""

    def synchronize(self) -> None:
        pass


DONE = Done()


class Inline:
    """The thread that calls: work is done at once."""

    def run(self, work: Work) -> None:
        work()

    def wait(self, event: Any) -> None:
        event.synchronize()

    def record(self) -> Done:
        return DONE


class HostEvent:
    """Set by a Worker; carries the exception of the work before it to whoever waits."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self.error: BaseException | None = None

    def happened(self, error: BaseException | None) -> None:
        self.error = error
        self._set.set()

    def synchronize(self) -> None:
        self._set.wait()
        if self.error is not None:
            raise self.error


class Worker:
    """A thread that does work in order, started when it is first needed; `close` ends it, and may be called twice.

    It is a daemon and holds nothing of its owner: a program that forgets to close it ends all the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._finalizer = weakref.finalize(self, self._queue.put, None)
        self._finalizer.atexit = False

    def run(self, work: Work) -> None:
        self._put(("run", work))

    def wait(self, event: Any) -> None:
        if event is not DONE:
            self._put(("wait", event))

    def record(self) -> HostEvent:
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

    def _put(self, item: tuple[str, Any]) -> None:
        if self._closed:
            raise ValueError(f"{self._name}: is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(item)


def _serve(items: queue.SimpleQueue[Any]) -> None:
    failed: BaseException | None = None  # until an event has taken it to somebody who waits
    while (item := items.get()) is not None:
        kind, what = item
        if kind == "event":
            what.happened(failed)
            failed = None
        elif failed is None:
            try:
                with torch.inference_mode():
                    what() if kind == "run" else what.synchronize()
            except BaseException as error:  # noqa: BLE001  raised again by the event that follows
                failed = error
        del item, what


class CudaStream:
    """A stream of a CUDA device, as torch has it."""

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
    """A stream whose work names it by itself: it need not be made current, which takes 15 us."""

    def run(self, work: Work) -> None:
        work()


class CurrentStream(CudaStream):
    """The stream that is current where this is made, as long as it is: work goes there as it is."""

    def run(self, work: Work) -> None:
        work()
