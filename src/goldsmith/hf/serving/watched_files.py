"""WatchedFiles: the files that a server's answers come from, and whether they have changed since it started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ...offload.store.expert_store import ExpertStore
from .refusals import UNAVAILABLE, RequestRefusal

READ = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".gguf")  # what a model's folder is read for


class WatchedFiles:
    """Size and time of the store and of the files in the folders of the model and its adapters.

    The store is mapped: a file that is written over changes the numbers of the next step, so `check` runs before and
    after every step. A store that is replaced by another file, or deleted, does no harm: the mapping keeps the old one.
    """

    def __init__(self, store: ExpertStore, places: Iterable[Path]) -> None:
        self._store, self._file = store.path, os.open(store.path, os.O_RDONLY)
        self._store_state = _state(os.fstat(self._file))
        self._files = {path: _state(os.stat(path)) for place in places for path in _read_files(place)}
        self._changed: str | None = None

    def check(self) -> None:
        """Raises RequestRefusal if a file has changed, and from then on."""
        if self._changed is None:
            self._changed = self._look()
        if self._changed is not None:
            raise RequestRefusal(
                UNAVAILABLE,
                f"{self._changed} has changed since the server started, and its text could be wrong: start it again.",
                code="files_changed",
            )

    def close(self) -> None:
        os.close(self._file)

    def _look(self) -> str | None:
        if _state(os.fstat(self._file)) != self._store_state:
            return f"The store {self._store.name}"
        for path, state in self._files.items():
            try:
                same = _state(os.stat(path)) == state
            except OSError:
                same = False
            if not same:
                return f"The file {path.name} of {path.parent.name}"
        return None


def _state(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _read_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in place.iterdir() if path.suffix in READ and path.is_file())
