"""The files of a candidate: read as Python reads them, and written below the folder that its process may use."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

from .isolation.loading import Refusal

_ENCODING = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+", re.M | re.A)  # tokenize's, in several lines


def decoded(content: bytes) -> str:
    """The text of a Python file, in the encoding that it declares, or UTF-8; ValueError where it has none."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return io.TextIOWrapper(io.BytesIO(content), encoding).read()
    except (SyntaxError, LookupError) as error:  # an encoding that Python does not know, or that is none of texts
        raise ValueError(str(error)) from None


def write_below(folder: Path, path: str, text: str) -> Path:
    """Write a source to a path inside `folder`; raises `Refusal` for a path that leads out of it."""
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()) or file == folder.resolve():
        raise Refusal("bad_path", f"a source has the path {path!r}, which is not inside the solution")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.write_text(_in_utf8(text) if file.suffix == ".py" else text, encoding="utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise Refusal(
            "does_not_parse", f"the source has {character!r}, half of a surrogate pair, which is no character"
        ) from None
    return file


def _in_utf8(source: str) -> str:
    """A Python source that declares UTF-8 where it declares another encoding; one that Python does not know stays."""
    try:
        encoding, lines = tokenize.detect_encoding(io.BytesIO(source.encode(errors="replace")).readline)
    except SyntaxError:
        return source
    return source if encoding.startswith("utf-8") else _ENCODING.sub(r"\1utf-8", source, count=1)
