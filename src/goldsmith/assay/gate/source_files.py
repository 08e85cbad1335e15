"""The files of a candidate, written below the folder that its process may use."""

from __future__ import annotations

from pathlib import Path

from .isolation.loading import Refusal


def write_below(folder: Path, path: str, text: str) -> Path:
    """Write a source to a path inside `folder`; raises `Refusal` for a path that leads out of it."""
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()) or file == folder.resolve():
        raise Refusal("bad_path", f"a source has the path {path!r}, which is not inside the solution")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise Refusal(
            "does_not_parse", f"the source has {character!r}, half of a surrogate pair, which is no character"
        ) from None
    return file
