"""How the command line speaks: results on stdout, everything else on stderr, and errors in one readable paragraph."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

USAGE = 2  # exit status: the command cannot be carried out


class Problem(Exception):
    """Something that the user can put right."""


def in_a_paragraph(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose `Problem`s are printed as one paragraph, without a traceback, with exit status 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except Problem as problem:
            say(str(problem))
            raise typer.Exit(USAGE) from None

    return wrapped


def say(text: str) -> None:
    """One paragraph on stderr."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    # long names (paths, lists of operators) may stand alone on a line, but are never cut
    typer.echo(textwrap.fill(visible(text), width, break_long_words=False, break_on_hyphens=False), err=True)


def visible(text: str) -> str:
    """With control characters written out: a message may quote what a target's module raised."""
    if all(c.isprintable() or c in "\t\n" for c in text):
        return text
    from ..assay.support import printable as written_out  # seldom: it loads torch

    return written_out.visible(text)


@contextmanager
def told(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Inside, `handler` is called on these signals, but for those that are ignored, as by nohup or a shell's `&`."""
    before: dict[int, Any] = {}
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
def ends_like_ctrl_c() -> Iterator[None]:
    """Inside, being told to terminate or to hang up ends the work as Ctrl-C does: with what was finished."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    with told(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


def put(text: str) -> None:
    """Text to stdout, at once. Problem: it cannot be written there; BrokenPipeError: whoever read it has gone."""
    if sys.stdout is None:
        raise Problem("stdout is closed, so that nothing can be written to it.")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # so that Python's own flush at its end has somewhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise Problem(f"stdout cannot be written to: {error.strerror or error}.") from error


def put_json(result: Any) -> None:
    """One line of JSON; nothing where whoever read it has gone."""
    with contextlib.suppress(BrokenPipeError):
        put(json.dumps(result) + "\n")


def console(*, stderr: bool = False) -> Console:
    """Plain text when not a terminal; there 100 columns, so that tables in logs keep their shape."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 100
    return Console(stderr=stderr, highlight=False, width=width, soft_wrap=False)


def duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def count(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"
