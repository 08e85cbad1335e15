"""Tables and data sets, read by the package `datasets`: .json, .csv, .parquet, folders, and names."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....core.json_values import parse_json
from ..errors import DataError, MissingPackage
from .rows import DataRow, RowPlace
from .text_files import checksum, decoded, parsed_lines

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
SAVED = ("dataset_dict.json", "state.json")  # what Dataset.save_to_disk leaves in its folder
NOTHING = "it has no rows; at least one document is needed"

Reason = Callable[[BaseException], DataError]  # why `datasets` could not read it


class TableFile:
    """A .json, .csv or .parquet file."""

    def __init__(self, name: str):
        self.name = name
        self.kind = SUFFIXES[Path(name).suffix.lower()]

    def rows(self) -> Iterator[DataRow]:
        path = Path(self.name)
        _need_datasets(self.name)
        if not path.stat().st_size:
            raise DataError(path, "the file is empty; at least one document is needed")
        arguments: dict[str, object] = {"data_files": str(path), "split": "train"}
        if self.kind == "csv":
            arguments |= _csv_arguments(path)
        if self.kind == "json":
            arguments["parse_agent_traces"] = False
        yield from _rows(self.name, _loaded(self.name, self.kind, arguments, self._reason))

    def checksum(self) -> str:
        return checksum(Path(self.name))

    def _reason(self, error: BaseException) -> DataError:
        """Why `datasets` could not read the file, with the line where that can be known."""
        path = Path(self.name)
        if self.kind != "parquet":
            decoded(path)
        elif _has_no_rows(path):
            return DataError(path, NOTHING)
        if self.kind == "json":
            _check_json(path)
        match = re.search(r"in line (\d+)", str(error))
        reason = re.sub(r"^.*C error: ", "", _first_line(error))
        return DataError(path, f"not {self.kind} that datasets reads: {reason}", int(match[1]) if match else None)


def _has_no_rows(path: Path) -> bool:
    """Whether it is a whole parquet file without rows, for which `datasets` asks for batches of 0 rows."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return not read_metadata(path).num_rows
    except ArrowException:
        return False


class NamedDataset:
    """A data set of `datasets`: its name or a folder, with :SPLIT or :CONFIGURATION:SPLIT after it."""

    def __init__(self, name: str):
        self.name = name
        self.path, _, rest = name.partition(":")
        parts = re.fullmatch(r"([\w.-]+):(.+)", rest)
        self.configuration: str | None = parts[1] if parts else None
        self.split: str | None = parts[2] if parts else rest or None

    def rows(self) -> Iterator[DataRow]:
        _need_datasets(self.name)
        yield from _rows(self.name, self._dataset())

    def checksum(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(json.dumps(dict(row.columns), sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def _dataset(self) -> Dataset:
        from datasets import Dataset, DatasetDict, load_from_disk

        if any((Path(self.path) / name).is_file() for name in SAVED):
            with _explained(self.name, self._reason):
                whole = load_from_disk(self.path)
        else:
            whole = _loaded(self.name, self.path, {"name": self.configuration}, self._reason)
        if isinstance(whole, Dataset):
            if self.split is not None:
                raise DataError(self.name, f"it has no splits, and {self.split} is asked for")
            return whole
        splits = cast("DatasetDict", whole)
        split_name, _, part = (self.split or "train").partition("[")
        if self.split is None and len(splits) == 1:
            split_name = next(iter(splits))
        if split_name not in splits:
            raise DataError(
                self.name,
                f"it has no split {split_name}, but {', '.join(splits)}; give one, "
                f"as in {self.path}:{next(iter(splits))}",
            )
        if not part:
            return splits[split_name]
        return self._part(splits[split_name], split_name, f"[{part}")

    def _part(self, rows: Dataset, split: str, part: str) -> Dataset:
        """A share of a split, as `datasets` writes it: train[:90%]."""
        from datasets import ReadInstruction

        with _explained(self.name, self._reason):
            (where,) = ReadInstruction.from_spec(f"{split}{part}").to_absolute({split: len(rows)})
        return rows.select(range(where.from_, where.to))

    def _reason(self, error: BaseException) -> DataError:
        if isinstance(error, IndexError):  # load_from_disk takes the first of no data files
            for state in sorted(Path(self.path).glob("**/state.json")):
                if not cast("dict[str, object]", parse_json(state.read_text())).get("_data_files"):
                    return DataError(state.parent, NOTHING)
        reason = "datasets reads nothing from this folder" if Path(self.path).is_dir() else "datasets has no copy of it"
        return DataError(self.name, f"{reason}, and there is no file of this name: {_first_line(error)}")


def _rows(name: str, dataset: Dataset) -> Iterator[DataRow]:
    number = 0
    for number, row in enumerate(dataset, 1):
        columns = {key: value for key, value in cast("dict[str, object]", row).items() if value is not None}
        yield DataRow(RowPlace(name, number, "row"), _without_nulls(columns), from_table=True)
    if not number:
        raise DataError(name, NOTHING)


def _without_nulls(columns: dict[str, object]) -> dict[str, object]:
    """Columns without the nulls that a table writes for keys that an object lacks; a message keeps its content."""

    def cleaned(value: object) -> object:
        if isinstance(value, dict):
            return {key: cleaned(one) for key, one in value.items() if one is not None or key == "content"}
        return [cleaned(one) for one in value] if isinstance(value, list) else value

    return {key: cleaned(value) for key, value in columns.items()}


def _csv_arguments(path: Path) -> dict[str, object]:
    """Every column is text, so that 007 and NA stay what they are."""
    from datasets import Features, Value

    names = next(csv.reader(decoded(path).splitlines()), [])
    if len(set(names)) != len(names):
        raise DataError(path, f"two columns have the same name; the columns are {', '.join(map(repr, names))}", 1)
    return {"features": Features({name: Value("string") for name in names}), "keep_default_na": False}


def _check_json(path: Path) -> None:
    """Raises DataError with the line if the file is neither one JSON value nor JSON lines."""
    text = decoded(path)
    try:
        parse_json(text)
    except ValueError as error:
        if text.lstrip()[:1] == "{" and "\n{" in text.strip():
            for _ in parsed_lines(str(path), text):
                pass
        where = error if isinstance(error, json.JSONDecodeError) else None
        reason = f"{where.msg} (column {where.colno})" if where else "it is nested too deeply"
        raise DataError(path, f"not JSON: {reason}", where.lineno if where else None) from error


def _loaded(name: str, builder: str, arguments: dict[str, object], reason: Reason) -> Dataset:
    import datasets

    with _explained(name, reason):
        return cast("Dataset", datasets.load_dataset(builder, **arguments))


@contextmanager
def _explained(name: str, reason: Reason) -> Iterator[None]:
    """Turns the errors of `datasets`, which are of many classes, into one sentence; hides its bars and its log."""
    import datasets

    hidden, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise DataError(name, NOTHING) from error
        raise reason(error.__cause__ or error) from error
    finally:
        datasets.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()


def _need_datasets(name: str) -> None:
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise MissingPackage(f"{name} is read with", "datasets") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
