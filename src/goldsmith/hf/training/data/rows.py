"""DataRow: one row of the data before it is tokenized, and where it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..errors import DataError


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A file or the name of a data set, and the number of a line or a row in it."""

    source: str
    number: int
    unit: str = "line"

    def error(self, reason: str) -> DataError:
        return DataError(self.source, reason, self.number, self.unit)


@dataclass(frozen=True, slots=True)
class DataRow:
    """The columns of one row. A table fills missing values: it has None and empty texts where JSON lines have none."""

    place: RowPlace
    columns: Mapping[str, object]
    from_table: bool = False


class DataSource(Protocol):
    """One of the files or data sets of a run."""

    name: str  # as the user gave it

    def rows(self) -> Iterator[DataRow]: ...

    def checksum(self) -> str:
        """A checksum of the content, by which a resumed run recognises its data."""
        ...
