"""Output files of a command: checked before the work begins; a failed write costs no result and no exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .terminal import Failure


def check_file(path: Path | None) -> None:
    """Raise Failure before the work, not after it, if a result file cannot be written. No command makes its folder."""
    if path is None:
        return
    if not path.parent.exists():
        raise Failure(f"cannot write {path}: there is no folder {path.parent}.")
    from ..assay.support.output_file import why_not

    why = why_not(path)
    if why:
        raise Failure(f"cannot write {path}: {why}.")


def check_files(*paths: Path | None) -> None:
    """`check_file` for each; raises Failure also where two are the same ordinary file, which only one could have."""
    named = [path for path in paths if path is not None]
    for number, path in enumerate(named):
        check_file(path)
        if path.resolve() in [other.resolve() for other in named[:number]] and (path.is_file() or not path.exists()):
            raise Failure(f"two outputs would be written to {path}: give each its own file.")


def write_json_file(path: str | Path, result: object) -> None:
    """Write a result as one line of JSON; an earlier file stays if this fails."""
    from ..assay.support.output_file import write_whole

    write_whole(path, json.dumps(result) + "\n")


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
