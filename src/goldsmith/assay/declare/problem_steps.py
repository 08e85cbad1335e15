"""Steps: the user's own code that runs beside the judge, which whoever waits for the judge may have to end.

A step is the import of a file, the inputs of a case, or one call of a golden. Steps within a step do not count.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LISTENERS: list[Callable[[str], None]] = []  # called with a step's words when it begins, and with "" when it has ended
_open: list[str] = []


@contextmanager
def step(words: str) -> Iterator[None]:
    """Context of a step; words: "a call of its golden".

    A KeyboardInterrupt becomes a RuntimeError in a process that ignores Ctrl-C, because only this code can raise it.
    """
    outermost = not _open
    _open.append(words)
    try:
        if outermost:
            _tell(words)
        yield
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            raise
        raise RuntimeError("it raised KeyboardInterrupt").with_traceback(error.__traceback__) from error
    finally:
        _open.pop()
        if outermost:
            _tell("")


def _tell(words: str) -> None:
    for listener in LISTENERS:
        listener(words)
