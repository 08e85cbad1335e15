"""What --data names: files, patterns of file names, folders, and data sets by name."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError
from .rows import DataSource
from .tables import SUFFIXES as TABLES
from .tables import NamedDataset, TableFile
from .text_files import JSON_LINES, TEXTS, JsonLines, TextFile

SUFFIXES = (*TEXTS, JSON_LINES, *TABLES)


def sources(names: str | Path | Sequence[str | Path], *, document: str = "blank") -> list[DataSource]:
    """The files and data sets that these names mean, in order; a pattern such as data/*.jsonl means all its files.

    Raises DataError for a missing file, an unsupported kind, or a name that comes twice.
    """
    listed = [names] if isinstance(names, str | Path) else list(names)
    expanded = [one for name in listed for one in _expanded(str(name))]
    for name in expanded:
        check(name)
        if expanded.count(name) > 1:
            raise DataError(name, "it is given twice")
    return [_source(name, document) for name in expanded]


def check(name: str) -> None:
    """Refuses missing files and unsupported kinds, before slow work begins."""
    if not name.strip():
        raise DataError(repr(name), "this is no name of a file or of a data set")
    path = Path(name)
    suffix = path.suffix.lower()
    if path.is_dir() and suffix not in SUFFIXES:
        return
    if not path.exists() and not _is_file_name(name):
        return
    if suffix not in SUFFIXES:
        ending = f"the name ends in {path.suffix}" if path.suffix else "the name has no ending"
        raise DataError(path, f"{ending}; supported are {', '.join(SUFFIXES)}")
    if not path.is_file():
        kind = "it is a folder" if path.is_dir() else "it is not an ordinary file"
        raise DataError(path, kind if path.exists() else "there is no such file")


def checksum(of: Sequence[DataSource]) -> str:
    """A checksum of the content of all sources; of a single file it is that of its bytes."""
    sums = [source.checksum() for source in of]
    return sums[0] if len(sums) == 1 else hashlib.sha256(" ".join(sums).encode()).hexdigest()


def shown(names: Sequence[str]) -> str:
    """The names without their folders, at most three."""
    short = [Path(name).name if _is_file_name(name) else name for name in names]
    return ", ".join(short) if len(short) <= 3 else f"{', '.join(short[:2])} and {len(short) - 2} more"


def _expanded(name: str) -> list[str]:
    if not glob.has_magic(name) or Path(name).exists() or not _is_file_name(name):
        return [name]
    if not (files := sorted(glob.glob(name, recursive=True))):
        raise DataError(name, "no file matches this pattern")
    return files


def _is_file_name(name: str) -> bool:
    """Whether the name can only be meant as a file's or a folder's, and not as a data set's: ORG/NAME or NAME."""
    without_split = name.partition(":")[0]
    if Path(without_split).is_dir():
        return Path(without_split).suffix.lower() in SUFFIXES
    return (
        Path(name).suffix.lower() in SUFFIXES
        or Path(name).exists()
        or name.startswith((".", "/", "~"))
        or without_split.count("/") > 1
    )


def _source(name: str, document: str) -> DataSource:
    suffix = Path(name).suffix.lower()
    if not _is_file_name(name):
        return NamedDataset(name)
    if suffix in TEXTS:
        return TextFile(name, whole=document == "whole")
    return JsonLines(name) if suffix == JSON_LINES else TableFile(name)
