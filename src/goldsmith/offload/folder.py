"""Where stores live that nobody gave a path: the cache folder, under keys of their contents."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .build import Progress
from .contents import state_of, surveyed
from .errors import StoreError
from .publish import published
from .store import ExpertStore, opened_source

_OP = "offload.cached_store"
_DIGITS = re.compile(r"[0-9a-f]{32}")


def cache_folder() -> Path:
    """$GOLDSMITH_CACHE, or `goldsmith` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("GOLDSMITH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "goldsmith"


def store_path(key: str) -> Path:
    """The file of a store with this key in the cache folder."""
    if not _DIGITS.fullmatch(key):
        raise ValueError(f"offload.store_path: key={key!r}, wanted 32 hexadecimal digits")
    return cache_folder() / "stores" / f"{key}.experts"


def fingerprint_of(
    source: Any,
    *,
    format: str = "auto",
    group_size: int | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
) -> str:
    """The fingerprint that a store of this source would have; reads the sample of every expert (offload/samples.py)."""
    said: dict[str, Any] = {
        "format": format, "group_size": group_size, "activation": activation, "alpha": alpha, "limit": limit
    }  # fmt: skip
    return surveyed(_OP, opened_source(source), said, whole=False)[0]


def cached_store(
    source: Any,
    *,
    format: str = "auto",
    group_size: int | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    progress: Progress | None = None,
) -> ExpertStore:
    """The store of this source in the cache folder: the one that is there, or a new one

    It lies under a key of every byte of the source. The source is read twice (first for its key), so it is a mapping or
    the folder of a checkpoint. The key of a checkpoint is kept beside the stores, and holds as long as its files are as
    they were. A file that is there but damaged or of another version is replaced: for a source in memory it is compared
    with the source to the last byte, for one on disk its header is looked at.
    """
    source = opened_source(source)
    if not isinstance(source, Mapping):
        raise TypeError(f"{_OP}: source is a {type(source).__name__}, wanted a mapping or a folder, to read it twice")
    said: dict[str, Any] = {
        "format": format, "group_size": group_size, "activation": activation, "alpha": alpha, "limit": limit
    }  # fmt: skip
    files: list[Path] | None = getattr(source, "files", None)
    path = store_path(_key(source, files, said, progress))
    if path.exists():
        with contextlib.suppress(StoreError):  # it is made again below
            found = ExpertStore.open(path)
            try:
                if files is None and found.exact:
                    found.check_source(source, whole=True, activation=activation, alpha=alpha, limit=limit)
                return found
            except BaseException:
                found.close()
                raise
    _make(path.parent)
    return ExpertStore.build(source, path, **said, overwrite=True, progress=progress)


def _key(source: Any, files: list[Path] | None, said: dict[str, Any], progress: Progress | None) -> str:
    """Of every byte of the source; of files that were read before and have not been touched since, as it was then."""
    if files is None:
        return surveyed(_OP, source, said, whole=True, progress=progress)[1]
    sampled = surveyed(_OP, source, said, whole=False)[1]
    state = state_of(files, sampled)
    kept = cache_folder() / "keys" / state
    with contextlib.suppress(OSError, UnicodeDecodeError):
        key = kept.read_text(encoding="ascii")
        if _DIGITS.fullmatch(key):
            return key
    key = surveyed(_OP, source, said, whole=True, progress=progress)[1]
    if state_of(files, sampled) == state:  # else somebody writes to them now, and the next run looks again
        with contextlib.suppress(OSError):  # a folder that is read only: the next run reads the files again
            _make(kept.parent)
            with published(kept) as file:
                file.write(key.encode())
    return key


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"offload: the folder for stores cannot be made ({error.strerror}): set GOLDSMITH_CACHE, or give store="
        raise OSError(error.errno, text, str(folder)) from error
