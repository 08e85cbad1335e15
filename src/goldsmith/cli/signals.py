"""Handlers of signals for the time of a `with` block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SignalHandler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(handler: SignalHandler, *numbers: int) -> Iterator[None]:
    """Inside, `handler` is called on these signals, but for those that are ignored, as by nohup or a shell's `&`."""
    before: dict[int, SignalHandler | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: it is not Python's
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """Inside, being told to terminate or to hang up ends the work as Ctrl-C does: with what was finished."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    with handle_signals(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield
