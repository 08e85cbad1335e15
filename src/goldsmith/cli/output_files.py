"""Output files of a command: checked before the work begins; a failed write costs no result and no exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .terminal import Failure


def check_file(path: Path | None) -> None:
    """Raise Failure before the work, not after it, if a result file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}.") from error


def check_folder(path: Path) -> None:
    """Raise Failure before the work if --out cannot be written; does not leave a new folder behind."""
    from ..assay.support.output_folder import unwritable

    why = unwritable(path)
    if why:
        raise Failure(f"--out {path} cannot be written: {why}.")


def write_or_explain(what: object, write: Callable[[], object]) -> list[str]:
    """Write, and return no sentence, or the one that says why it failed, so that the result is still shown."""
    try:
        write()
    except OSError as error:
        return [f"Cannot write {what}: {error.strerror or error}."]
    except Exception as error:  # noqa: BLE001  safetensors has its own error for a full disk, for one
        return [f"Cannot write {what}: {type(error).__name__}: {error}."]
    return []
