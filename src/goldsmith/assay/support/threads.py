"""Threads of Python: how many run, which code starts some, and a call in a new one."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def running_threads() -> int:
    """Threads of Python, also those that `threading` does not know."""
    return _thread._count()


@contextmanager
def noted_threads(starts: list[str]) -> Iterator[None]:
    """Context in which every start of a thread adds to `starts`."""

    def noting(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: object, **kwargs: object) -> Any:
            starts.append(name)
            return start(*args, **kwargs)

        return started

    names = ("start_new_thread", "start_joinable_thread")
    known = [
        (o, n, vars(o)[n]) for o in (_thread, threading) for n in (*names, *(f"_{n}" for n in names)) if n in vars(o)
    ]
    for owner, name, start in known:
        setattr(owner, name, noting(name, start))
    try:
        yield
    finally:
        for owner, name, start in known:
            setattr(owner, name, start)


def in_a_thread(call: Callable[[], T]) -> T:
    """The result of a call in a new thread on the same device; an exception there is raised again here."""
    done: list[T] = []
    raised: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            done.append(call())
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return done[0]
