"""warnings_as_notes: a command's warnings in the words of its display."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TextIO


@contextlib.contextmanager
def warnings_as_notes(note: Callable[[str], None]) -> Iterator[None]:
    """Pass goldsmith's warnings to `note`; all others are shown as Python shows them."""
    with warnings.catch_warnings():
        plain = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
            line: str | None = None,
        ) -> None:  # fmt: skip
            if category.__module__.startswith("goldsmith") or str(message).startswith("offload."):
                note(str(message))
            else:
                plain(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
