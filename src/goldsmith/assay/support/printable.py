"""Foreign text for reports: control characters escaped, paths as a reader elsewhere knows them."""

from __future__ import annotations

import re
from pathlib import Path

# all but newline and tab; marks that change the direction of text; lone surrogates, which no file can hold
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Every control character as its escape, so that \x1b[31m in a message colours nothing and moves no cursor."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def text_of(error: BaseException | None) -> str:
    """The text of an exception; also where its own code for that raises."""
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001 - it may raise whatever it likes
        return f"its text cannot be made: {type(other).__name__}"


def from_here(filename: str) -> str:
    """The path relative to the current folder, or the file name: reports are read on other machines."""
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name
