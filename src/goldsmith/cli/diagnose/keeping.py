"""What is kept of a diagnosis: where it is to stand is looked at before the work, and no failure to write loses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..say import Problem


def folder(path: Path) -> None:
    """Say now, not after the work, that nothing can be kept in a folder; one that is not there is not left behind."""
    from ...assay.support.output_folder import unwritable

    why = unwritable(path)
    if why:
        raise Problem(f"--out {path} cannot be written: {why}.")


def lost(what: object, write: Callable[[], Any]) -> list[str]:
    """Nothing, or one sentence that says why it could not be written: what was found is to be told all the same."""
    try:
        write()
    except OSError as error:
        return [f"Cannot write {what}: {error.strerror or error}."]
    except Exception as error:  # noqa: BLE001  a full disk is safetensors' own error; whatever it is, it loses nothing
        return [f"Cannot write {what}: {type(error).__name__}: {error}."]
    return []
