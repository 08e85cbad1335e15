"""JSON from a user's files, read so that every fault of a text is a ValueError."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes | bytearray, *, parse_constant: Callable[[str], object] | None = None) -> Any:
    """The value of a JSON text. Raises ValueError for text that is not JSON, also for one nested too deeply.

    json.loads raises RecursionError for the latter, which no reader of a file expects.
    """
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_rows(path: Path) -> list[Any]:
    """The values of a file of JSON lines, without a line that a kill cut short; none where there is no such file."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            rows.append(parse_json(line))
        except ValueError:
            continue
    return rows


class JsonRows:
    """The rows of a file of JSON lines: those of earlier runs, and those that are added, each as it comes."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.is_file() else b""
        if content and not content.endswith(b"\n"):  # a kill cut this line short
            os.truncate(path, content.rfind(b"\n") + 1)
        self.path, self.rows = path, json_rows(path)

    def add(self, row: dict[str, Any]) -> None:
        """Raises OSError where the file cannot be written."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
