"""Precisions that an earlier run with the same file of rows has measured, so that a run goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from goldsmith.cli.terminal import Failure

from .rows import GenerateRow

# what a row must share with one that is to be measured
IDENTITY = (
    "shape", "sizes", "format", "dense", "label", "compute", "level", "prompt_tokens", "decode_tokens", "threads",
    "machine", "device", "versions", "commit",
)  # fmt: skip


def earlier(file: str | None) -> list[GenerateRow]:
    """The rows of a file; none if it does not exist yet."""
    if file is None or file == "-":
        raise Failure("--resume reads the file of --json: give one.")
    path = Path(file)
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), 1):
        try:
            row = json.loads(line)
            if row.get("op") == "generate":
                rows.append(GenerateRow.of_json(row))
        except (ValueError, TypeError, AttributeError) as error:
            if number == 1 or path.read_text(encoding="utf-8").endswith("\n"):
                raise Failure(f"--json {file}: line {number} is not a row: {error}.") from error
    return rows


def measured(planned: Sequence[GenerateRow], rows: Sequence[GenerateRow], rounds: int) -> list[GenerateRow] | None:
    """The newest rows of exactly these engines, if all have all rounds; otherwise None."""
    by_name = {_name(row): row for row in rows if row.decode and row.prompt and row.prompt.rounds >= rounds}
    whole = [row if row.note else by_name.get(_name(row)) for row in planned]  # a note: it lacks this precision
    return None if None in whole else [row for row in whole if row is not None]


def _name(row: GenerateRow) -> str:
    return json.dumps([getattr(row, name) for name in IDENTITY], sort_keys=True)
