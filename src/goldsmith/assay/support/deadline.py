"""Time limits: costly work that can be skipped asks for the time that is left; a signal asks where a call stands."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# ignored by a process that does not expect it; LLVM, in Triton's compiler, takes SIGUSR1, SIGUSR2 and others for itself
WRITE_STACK = signal.SIGTERM if sys.platform == "win32" else signal.SIGURG

_END: ContextVar[float] = ContextVar("_END", default=float("inf"))
_LEFT_OUT: ContextVar[list[str] | None] = ContextVar("_LEFT_OUT", default=None)


@contextmanager
def until(end: float) -> Iterator[list[str]]:
    """Inside, time ends at `end` (of time.perf_counter()); yields the descriptions of the work that was skipped."""
    left_out: list[str] = []
    tokens = _END.set(end), _LEFT_OUT.set(left_out)
    try:
        yield left_out
    finally:
        _END.reset(tokens[0])
        _LEFT_OUT.reset(tokens[1])


def lacks(seconds: float, what: str) -> bool:
    """Whether less than `seconds` is left; then `what` is recorded as skipped."""
    if _END.get() - time.perf_counter() >= seconds:
        return False
    left_out = _LEFT_OUT.get()
    if left_out is not None and what not in left_out:
        left_out.append(what)
    return True


def cut() -> bool:
    """Whether anything was skipped."""
    return bool(_LEFT_OUT.get())


class Pace:
    """Tells a loop, before each step, whether time remains for a step as long as the longest so far.

    over(more): whether time is over, or would be `more` seconds later. cut: whether it was over once.
    """

    def __init__(self, over: Callable[[float], bool]) -> None:
        self.over, self.longest, self.looked = over, 0.0, time.perf_counter()
        self.cut = False

    def __call__(self) -> bool:
        now = time.perf_counter()
        self.longest, self.looked = max(self.longest, now - self.looked), now
        self.cut |= self.over(self.longest)
        return self.cut
