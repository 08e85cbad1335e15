"""Whose turn it is with an engine: one thread at a time, in the process that it was made in, until it is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from .settings import OP

Made = TypeVar("Made")


class Turns:
    """`take` a turn, one after the other, until it is closed

    Within a turn of the same thread (a signal's handler comes there, and who shows warnings) what is asked for is done
    at once, but for the end: that is at the turn's, since what is under way needs what the end gives back.
    """

    def __init__(self) -> None:
        self._lock, self._pid, self._inside, self.closed = threading.RLock(), os.getpid(), False, False
        self._end: Callable[[], None] | None = None  # what is still to be done at the turn's

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process: without its threads and its GPU, and none here gives the lock back."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises ValueError, or RuntimeError in a fork, where no turn is to be had; to be asked before `take`."""
        if self.closed:
            raise ValueError(f"{OP}: it was closed; make a new one")
        if self.forked:
            raise RuntimeError(
                f"{OP}: it was made in process {self._pid}, and this is a fork of it: its threads and its GPU are not "
                "here; make an Engine in this process (the store can be shared)"
            )

    def take(self, work: Callable[..., Made], *given: object) -> Made:
        """work(*given), when it is this thread's turn."""
        with self._lock:
            if self.closed:  # by another thread, while this one waited
                self.check()
            outer = self._inside
            try:
                self._inside = True
                made = work(*given)
            except BaseException as error:
                self._inside = outer
                self._leave(error)
                raise
            self._inside = outer
            self._leave(None)
            return made

    def take_if_open(self, work: Callable[[], None]) -> None:
        """The same; nothing is left to do where it was closed."""
        if self.closed:
            return
        self.check()
        with self._lock:
            if not self.closed:
                self.take(work)

    def close(self, end: Callable[[], None], under_way: BaseException | None = None) -> None:
        """end() is done, once, and not in a fork. under_way: what comes before an error in it, and has it as a note."""
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
            under_way.add_note(f"At the end of the engine, too: {error}")
