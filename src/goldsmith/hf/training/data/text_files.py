"""Text files and JSON lines, read without other packages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ....core.json_values import parse_json
from ..errors import DataError
from .formats import KNOWN, with_article
from .rows import DataRow, RowPlace

TEXTS = (".txt", ".md")
JSON_LINES = ".jsonl"
BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class TextFile:
    """A .txt or .md file: the text between blank lines is a document, or the whole file."""

    def __init__(self, name: str, *, whole: bool):
        self.name, self.whole = name, whole

    def rows(self) -> Iterator[DataRow]:
        text = content(Path(self.name))
        for line, part in [(1, text)] if self.whole else paragraphs(text):
            yield DataRow(RowPlace(self.name, line), {"text": part})

    def checksum(self) -> str:
        return checksum(Path(self.name))


class JsonLines:
    """A .jsonl file: a JSON object in each line."""

    def __init__(self, name: str):
        self.name = name

    def rows(self) -> Iterator[DataRow]:
        for line, columns in parsed_lines(self.name, content(Path(self.name))):
            yield DataRow(RowPlace(self.name, line), columns)

    def checksum(self) -> str:
        return checksum(Path(self.name))


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content(path: Path) -> str:
    """The file's text; raises DataError if there is none."""
    text = decoded(path)
    if not text.strip():
        raise DataError(path, "the file is empty; at least one document is needed")
    return text


def decoded(path: Path) -> str:
    """The file's text; raises DataError unless it is UTF-8."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror or error}") from error
    if raw[:2] in BOMS:
        raise DataError(path, f"the text is {BOMS[raw[:2]]}, not UTF-8; `iconv -f UTF-16 -t UTF-8` converts it")
    if (at := raw.find(b"\0")) >= 0:
        line = raw.count(b"\n", 0, at) + 1
        problem = f"byte 0x00 at offset {at}, which text never contains"
        raise DataError(path, f"{problem}; if it is UTF-16, `iconv -f UTF-16LE -t UTF-8` converts it", line)
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        raise DataError(path, f"{problem}; convert the file, for instance `iconv -f LATIN1 -t UTF-8`", line) from error


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, separated by blank lines."""
    at, line = 0, 1
    for gap in [*re.finditer(r"\n(?:[ \t]*\n)+", text), None]:
        end = gap.start() if gap else len(text)
        if text[at:end].strip():
            yield line, text[at:end].strip("\n")
        after = gap.end() if gap else end
        line += text.count("\n", at, after)
        at = after


def parsed_lines(path: str, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    """(line, object) of JSON lines; raises DataError for the first line that is not a JSON object."""
    for line, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        try:
            row = parse_json(raw)
        except json.JSONDecodeError as error:  # its own line number counts within the row, so it is always 1
            raise DataError(path, f"not JSON: {error.msg} (column {error.colno}); a row is {KNOWN}", line) from error
        except ValueError as error:
            raise DataError(path, f"not JSON: {error}; a row is {KNOWN}", line) from error
        if not isinstance(row, dict):
            raise DataError(path, f"{with_article(row)}; a row is {KNOWN}", line)
        yield line, row
