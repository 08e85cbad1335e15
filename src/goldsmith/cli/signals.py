"""Signal handlers that last for one `with` block."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .terminal import INTERRUPTED_EARLY, Failure

SignalHandler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(handler: SignalHandler, *numbers: int) -> Iterator[None]:
    """Call `handler` on these signals inside the block, except on those already ignored (nohup, a shell's `&`)."""
    before: dict[int, SignalHandler | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: the handler was not installed by Python
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP inside the block, so that finished work is kept as after Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    with handle_signals(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit at once with status 130 on Ctrl-C, SIGTERM and SIGHUP inside the block, which imports large packages.

    A KeyboardInterrupt there leaves a package half imported: numpy then raises RecursionError (exit status 1), and
    other packages catch it and go on.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                line = "\n" if sys.stderr.isatty() else ""  # a terminal shows "Loading torch^C" there
                os.write(sys.stderr.fileno(), f"{line}{INTERRUPTED_EARLY}.\n".encode())
        os._exit(130)

    with handle_signals(leave, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def loading_hf() -> Iterator[None]:
    """The imports of `goldsmith.hf`: they end as in `exit_on_signals`, and a missing package is a Failure.

    For a missing package goldsmith.hf raises an ImportError without a name, which says what to install. An ImportError
    with a name comes from a broken module.
    """
    try:
        with exit_on_signals():
            yield
    except ImportError as error:
        if error.name is not None:
            raise
        raise Failure(f"{error}.") from error
