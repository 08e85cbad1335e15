"""Checks that a folder can be written to, before the work whose result is to be stored there."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path


def unwritable(folder: Path) -> str:
    """Why nothing can be written there, "" where it can. A folder created for the check is removed again."""
    missing: list[Path] = []
    try:
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except FileExistsError:
        return "it is not a folder"
    except OSError as error:
        return str(error.strerror or error)
    finally:
        for new in missing:
            with contextlib.suppress(OSError):
                new.rmdir()
