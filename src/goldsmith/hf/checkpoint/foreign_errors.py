"""Errors that transformers, its packages and the system raise about a user's file, as one sentence."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

LONGEST = 300  # characters of another library's message that a sentence quotes
SYSTEM_ERROR = re.compile(r"os error (\d+)")
SPEAKING = (OSError, ValueError, RuntimeError)  # of the built-in errors, those whose messages need no name before them


@contextlib.contextmanager
def explained(subject: str) -> Iterator[None]:
    """Raises whatever the block raises as ValueError("{subject}: {the first paragraph of its message}").

    Only for blocks in which other libraries read a user's file or make a model of it: they raise many classes for one
    wrong value there (validation errors of their own, ZeroDivisionError, AssertionError, RecursionError, Exception).
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{subject}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """The first paragraph of another library's message on one line, with the error's class where it says too little."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = " ".join(str(error).strip().partition("\n\n")[0].split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    if type(error).__module__ == "builtins" and type(error) is not Exception and not isinstance(error, SPEAKING):
        return f"{type(error).__name__}: {text}".removesuffix(": ")
    return text or type(error).__name__


@contextlib.contextmanager
def writing(output: Path) -> Iterator[None]:
    """Raises an error of the block, which writes files of `output`, again as OSError with this name and the reason.

    The files have temporary names, which mean nothing to a reader, and safetensors has errors of its own.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        match = SYSTEM_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        reason = os.strerror(number) if number is not None else brief(error)
        raise OSError(number, f"could not be written: {reason}", str(output)) from error
