"""parallel_makers: `alternating` gives the results of makers that share a list, each in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_PART = 5  # items that a maker takes at once
Maker = Callable[[Sequence[Item]], Iterator[Result]]


def alternating(makers: Sequence[Maker[Item, Result]], items: Sequence[Item]) -> Iterator[Result]:
    """All results, as they come. Whoever stops reading stops the makers after their current item."""
    parts: queue.SimpleQueue[Sequence[Item]] = queue.SimpleQueue()
    for start in range(0, len(items), _PART):
        parts.put(items[start : start + _PART])
    results: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()
    threads = [threading.Thread(target=_make, args=(m, parts, results, stopped), daemon=True) for m in makers]
    for thread in threads:
        thread.start()
    try:
        ended = 0
        while ended < len(threads):
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                ended += 1
            else:
                yield result
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def _make(
    maker: Maker[Item, Result], parts: queue.SimpleQueue[Sequence[Item]],
    results: queue.SimpleQueue[Result | BaseException | None], stopped: threading.Event,
) -> None:  # fmt: skip
    try:
        while not stopped.is_set():
            for result in maker(parts.get_nowait()):
                results.put(result)
                if stopped.is_set():
                    break
    except queue.Empty:
        pass
    except Exception as error:  # noqa: BLE001 - raised again by the reader
        results.put(error)
    results.put(None)
