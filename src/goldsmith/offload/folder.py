"""Where stores live that nobody gave a path: the cache folder, under their fingerprints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .build import Progress, Recipe
from .errors import StoreError
from .header import LayerEntry
from .samples import digest, fingerprint
from .source import experts_of, layers_of
from .store import ExpertStore, opened_source

_OP = "offload.cached_store"
_DIGITS = re.compile(r"[0-9a-f]{32}")


def cache_folder() -> Path:
    """$GOLDSMITH_CACHE, or `goldsmith` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("GOLDSMITH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "goldsmith"


def store_path(fingerprint: str) -> Path:
    """The file of a store with this fingerprint in the cache folder."""
    if not _DIGITS.fullmatch(fingerprint):
        raise ValueError(f"offload.store_path: fingerprint={fingerprint!r}, wanted 32 hexadecimal digits")
    return cache_folder() / "stores" / f"{fingerprint}.experts"


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
    recipe = Recipe(format, group_size, {"activation": activation, "alpha": alpha, "limit": limit}, False)
    entries = []
    for layer, weights in layers_of(opened_source(source), _OP):
        entry = LayerEntry(layer, 0, 0, b"", b"")
        for expert in experts_of(weights, f"{_OP}: layer {layer}"):
            recipe.fit(expert, f"{_OP}: layer {layer}", entry.experts)
            entry.samples += digest(expert)
            entry.experts += 1
        entries.append(entry)
    if recipe.blocks is None:
        raise ValueError(f"{_OP}: source holds no layer, wanted at least one")
    return fingerprint(recipe.blocks, recipe.options, entries)


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

    The source is read twice (first its sample), so it is a mapping or the folder of a checkpoint. A file that is
    there but damaged or of another version is replaced.
    """
    source = opened_source(source)
    if not isinstance(source, Mapping):
        raise TypeError(f"{_OP}: source is a {type(source).__name__}, wanted a mapping or a folder, to read it twice")
    said: dict[str, Any] = {
        "format": format, "group_size": group_size, "activation": activation, "alpha": alpha, "limit": limit
    }  # fmt: skip
    path = store_path(fingerprint_of(source, **said))
    if path.exists():
        try:
            return ExpertStore.open(path)
        except StoreError:
            pass  # it is made again below
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"offload: the folder for stores cannot be made ({error.strerror}): set GOLDSMITH_CACHE, or give store="
        raise OSError(error.errno, text, str(path.parent)) from error
    return ExpertStore.build(source, path, **said, overwrite=True, progress=progress)
