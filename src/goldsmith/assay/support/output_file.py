"""Writes a file whole or not at all, so that a full disk costs no earlier file of that name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Replace the text of a file and create its folder. If that fails, an earlier file stays as it was.

    The text goes to a new file beside it, which is then renamed. A device, a pipe and a file in a folder that takes no
    new files are written in place.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (not path.is_file() or not os.access(path.parent, os.W_OK)):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def why_not(path: Path) -> str:
    """Why the file cannot be written, "" if it can. A file or folder created for the check is removed again."""
    folders: list[Path] = []
    created = False
    try:
        folders = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        created = not os.path.lexists(path)
        with open(path, "a", encoding="utf-8"):
            return ""
    except OSError as error:
        return str(error.strerror or error)
    finally:
        with contextlib.suppress(OSError):
            if created:
                path.unlink(missing_ok=True)
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
