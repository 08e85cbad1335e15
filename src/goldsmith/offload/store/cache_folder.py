"""The cache folder: stores without a path of the user's, filed under a key of their contents."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...core.shapes import kind
from ..errors import StoreError, StoreMismatch
from .atomic_file import atomic_write
from .expert_store import ExpertStore, opened_source
from .source import Source
from .source_key import fingerprint_and_key, state_of
from .writer import Progress

_OP = "offload.cached_store"
_DIGITS = re.compile(r"[0-9a-f]{32}")


def cache_folder() -> Path:
    """$GOLDSMITH_CACHE, or `goldsmith` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("GOLDSMITH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "goldsmith"


def store_path(key: str) -> Path:
    """The path of the store with this key in the cache folder."""
    if not _DIGITS.fullmatch(key):
        raise ValueError(f"offload.store_path: key={key!r}, expected 32 hexadecimal digits")
    return cache_folder() / "stores" / f"{key}.experts"


def fingerprint_of(
    source: Source | str | os.PathLike[str],
    *,
    format: str = "auto",
    group_size: int | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
) -> str:
    """The fingerprint that a store of this source would have; reads the sample of every expert (store/samples.py)."""
    recipe: dict[str, object] = {
        "format": format, "group_size": group_size, "activation": activation, "alpha": alpha, "limit": limit
    }  # fmt: skip
    return fingerprint_and_key(_OP, opened_source(source), recipe, whole=False)[0]


def cached_store(
    source: Source | str | os.PathLike[str],
    *,
    format: str = "auto",
    group_size: int | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    progress: Progress | None = None,
) -> ExpertStore:
    """The store of this source in the cache folder: an existing one, or a new one

    The key is a hash of every byte of the source. The source is read twice, first for the key, so it must be a mapping
    or the folder of a checkpoint. The key of a checkpoint is cached, and is valid until its files change. A store that
    is damaged, of another version or of other weights is replaced. A store of a source in memory is compared with the
    source byte by byte; a store of a checkpoint is compared by fingerprint, from the sample of every expert.
    Raises StoreError when the source's files change during the build; nothing of it remains.
    """
    source = opened_source(source)
    if not isinstance(source, Mapping):
        raise TypeError(f"{_OP}: source is {kind(source)}, expected a mapping or a folder, because it is read twice")
    options: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit}
    recipe = {"format": format, "group_size": group_size} | options
    files: list[Path] | None = getattr(source, "files", None)
    if files is None:
        path = store_path(fingerprint_and_key(_OP, source, recipe, whole=True, progress=progress)[1])

        def compare(store: ExpertStore) -> None:
            if store.exact:
                store.check_source(source, whole=True, **options)

        return _opened(path, compare) or _built(source, path, recipe, progress)
    fingerprint, sampled = fingerprint_and_key(_OP, source, recipe, whole=False)
    state = state_of(files, sampled)
    path = store_path(_key(source, files, recipe, sampled, progress))

    def compare_samples(store: ExpertStore) -> None:
        if store.fingerprint != fingerprint:
            raise StoreMismatch(f"{_OP}: {store.path} holds other weights than {files[0].parent}")

    result = _opened(path, compare_samples)
    if result is None:
        result = _built(source, path, recipe, progress)
        if state_of(files, sampled) != state:  # the files changed after the key was computed
            result.close()
            path.resolve().unlink(
                missing_ok=True
            )  # resolve a link that the user put there: delete the store, not the link
            raise StoreError(f"{_OP}: files of {files[0].parent} changed while they were read; run it again")
    return result


def _opened(path: Path, compare: Callable[[ExpertStore], None]) -> ExpertStore | None:
    """The existing store, if it can be opened and `compare` raises no StoreError; otherwise None."""
    if not path.exists():
        return None
    with contextlib.suppress(StoreError):
        store = ExpertStore.open(path)
        try:
            compare(store)
            return store
        except BaseException:
            store.close()
            raise
    return None


def _built(source: Source, path: Path, recipe: dict[str, Any], progress: Progress | None) -> ExpertStore:
    _make(path.parent)
    return ExpertStore.build(source, path, **recipe, overwrite=True, progress=progress)


def _key(
    source: Source,
    files: list[Path],
    recipe: dict[str, object],
    sampled: str,
    progress: Progress | None,
) -> str:
    """The key of every byte of the files; the cached key when the files have not changed since it was computed."""
    state = state_of(files, sampled)
    cached = cache_folder() / "keys" / state
    with contextlib.suppress(OSError, UnicodeDecodeError):
        key = cached.read_text(encoding="ascii")
        if _DIGITS.fullmatch(key):
            return key
    key = fingerprint_and_key(_OP, source, recipe, whole=True, progress=progress)[1]
    if (
        state_of(files, sampled) == state
    ):  # otherwise the files are being written to, and the next run hashes them again
        with contextlib.suppress(OSError):  # a read-only folder: the next run hashes the files again
            _make(cached.parent)
            with atomic_write(cached) as file:
                file.write(key.encode())
    return key


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = (
            f"offload: the folder for stores cannot be created ({error.strerror}): set GOLDSMITH_CACHE, or give store="
        )
        raise OSError(error.errno, text, str(folder)) from error
