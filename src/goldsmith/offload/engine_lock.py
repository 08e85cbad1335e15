"""The lock of an engine: one thread at a time, only in the process that created it, until it is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from .settings import OP

Result = TypeVar("Result")


class EngineLock:
    """Runs work one at a time (`take`) until `close`

    The lock is re-entrant: inside a turn of the same thread (in a signal handler, or in code that shows warnings) work
    runs at once. Only `close` waits for the end of the turn, because the work under way needs what it frees.
    """

    def __init__(self) -> None:
        self._lock, self._pid, self._inside, self.closed = threading.RLock(), os.getpid(), False, False
        self._end: Callable[[], None] | None = None  # to be called when the current turn ends

    @property
    def forked(self) -> bool:
        """Whether this is a forked process: it has no engine threads and no GPU, and the lock may be held forever."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises ValueError if closed, RuntimeError in a forked process; call it before `take`."""
        if self.closed:
            raise ValueError(f"{OP}: it was closed; make a new one")
        if self.forked:
            raise RuntimeError(
                f"{OP}: it was created in process {self._pid}, and this is a fork of it, without its threads and "
                "its GPU; make an Engine in this process (the store can be shared)"
            )

    def take(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Returns work(*arguments), once it is this thread's turn."""
        with self._lock:
            if self.closed:  # closed by another thread while this one waited
                self.check()
            outer = self._inside
            try:
                self._inside = True
                result = work(*arguments)
            except BaseException as error:
                self._inside = outer
                self._leave(error)
                raise
            self._inside = outer
            self._leave(None)
            return result

    def take_if_open(self, work: Callable[[], None]) -> None:
        """`take`, but does nothing if it is closed."""
        if self.closed:
            return
        self.check()
        with self._lock:
            if not self.closed:
                self.take(work)

    def close(self, end: Callable[[], None], under_way: BaseException | None = None) -> None:
        """Calls end() once, but not in a forked process. under_way: an exception that keeps priority; end's becomes a
        note.
        """
        if self.forked:
            self.closed = True
            return
        with self._lock:
            if not self.closed:
                self.closed, self._end = True, end
                self._leave(under_way)

    def _leave(self, under_way: BaseException | None) -> None:
        if self._end is None or self._inside:
            return
        end, self._end = self._end, None
        try:
            end()
        except (ValueError, RuntimeError, MemoryError, ArithmeticError) as error:
            if under_way is None:
                raise
            under_way.add_note(f"The end of the engine also failed: {error}")
