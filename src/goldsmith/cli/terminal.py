"""How the command line speaks: results on stdout, everything else on stderr, and errors in one readable paragraph."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T")
USAGE = 2  # exit status: the command cannot be carried out


class Problem(Exception):
    """Something that the user can put right."""


def in_a_paragraph(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose `Problem`s are printed as one paragraph, without a traceback, with exit status 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except Problem as problem:
            print_paragraph(str(problem))
            raise typer.Exit(USAGE) from None

    return wrapped


def print_paragraph(text: str) -> None:
    """One paragraph on stderr."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    # long names (paths, lists of operators) may stand alone on a line, but are never cut
    typer.echo(textwrap.fill(visible(text), width, break_long_words=False, break_on_hyphens=False), err=True)


def visible(text: str) -> str:
    """With control characters written out: a message may quote what a target's module raised."""
    if all(c.isprintable() or c in "\t\n" for c in text):
        return text
    from ..assay import visible as written_out  # seldom: it loads torch

    return written_out.visible(text)


def write_stdout(text: str) -> None:
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


def write_json(result: object) -> None:
    """One line of JSON; nothing where whoever read it has gone."""
    with contextlib.suppress(BrokenPipeError):
        write_stdout(json.dumps(result) + "\n")


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
