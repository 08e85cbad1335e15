"""Errors that transformers, its packages and the system raise about a user's file, as one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

LONGEST = 300  # characters of another library's message that a sentence quotes
SYSTEM_ERROR = re.compile(r"os error (\d+)")
# torch has an exception class only for GPU memory; for the CPU its messages contain these, the last on an overflow
MEMORY = ("DefaultCPUAllocator", "std::bad_alloc", "Storage size calculation overflowed")
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


class ModelError(ValueError):
    """A model of transformers cannot compute with the values in its config and its weights."""


@contextlib.contextmanager
def of_the_model() -> Iterator[None]:
    """Raises an error of the model's own code in transformers as ModelError.

    An error of goldsmith's code that such a model calls stays as it is, and so does one that means too little memory.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or out_of_memory(error) or not _in_transformers(error):
            raise
        raise ModelError(
            f"its code in transformers cannot compute with the values in config.json and these weights: {brief(error)}"
        ) from error


def _in_transformers(error: BaseException) -> bool:
    """Whether the innermost function of either package is one of transformers' models."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__", "")).split(".")
        if module[0] == "goldsmith" or module[:2] == ["transformers", "models"]:
            return module[0] != "goldsmith"
    return False


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that the CPU or a GPU has too little memory."""
    from torch import OutOfMemoryError

    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    names_memory = isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY)
    return names_memory or isinstance(error, (MemoryError, OutOfMemoryError))


def brief(error: BaseException) -> str:
    """The first paragraph of another library's message on one line, with the error's class where it says too little."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = " ".join(str(error).strip().partition("\n\n")[0].split())
    text = text.removesuffix(".") if len(text) <= LONGEST else f"{text[:LONGEST]}..."
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
