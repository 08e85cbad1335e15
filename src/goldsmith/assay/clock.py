"""When a check must be over: what costs much and can be left out looks here before it begins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_END: ContextVar[float] = ContextVar("_END", default=float("inf"))
_LEFT_OUT: ContextVar[list[str] | None] = ContextVar("_LEFT_OUT", default=None)


@contextmanager
def until(end: float) -> Iterator[list[str]]:
    """Inside, time is over at `end` of time.perf_counter(); gives what is left out for want of it, in words."""
    left_out: list[str] = []
    tokens = _END.set(end), _LEFT_OUT.set(left_out)
    try:
        yield left_out
    finally:
        _END.reset(tokens[0])
        _LEFT_OUT.reset(tokens[1])


def lacks(seconds: float, what: str) -> bool:
    """Whether less time is left than something takes, which is then left out, and said."""
    if _END.get() - time.perf_counter() >= seconds:
        return False
    left_out = _LEFT_OUT.get()
    if left_out is not None and what not in left_out:
        left_out.append(what)
    return True


def cut() -> bool:
    """Whether something was left out."""
    return bool(_LEFT_OUT.get())
