"""Whether anything can be kept in a folder, asked before the work of which something is to be kept."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path


def unwritable(folder: Path) -> str:
    """Why nothing can be written there, "" where it can; a folder that is not there is not left behind."""
    made: list[Path] = []
    try:
        made = [p for p in (folder, *folder.parents) if not p.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except FileExistsError:
        return "it is no folder"
    except OSError as error:
        return str(error.strerror or error)
    finally:
        for new in made:
            with contextlib.suppress(OSError):
                new.rmdir()
