"""log.jsonl: a row for each step and each evaluation, none of them twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Required, TypedDict, cast

from . import checkpoints


class LogRow(TypedDict, total=False):
    """A row of the log: of a step, or of an evaluation, which has step and eval_loss alone."""

    step: Required[int]
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    seconds: float
    eval_loss: float


def rows(path: Path) -> list[LogRow]:
    """What the log holds; a last line that a kill cut short is left out."""
    found: list[LogRow] = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(cast("LogRow", row))
    return found


class Journal:
    """Goes on after step `done`: rows of later steps, which the checkpoint knows nothing of, are dropped first."""

    def __init__(self, path: Path, done: int, earlier: list[LogRow] | None = None):
        kept = [row for row in (rows(path) if earlier is None else earlier) if row["step"] <= done]
        self.rows = kept if done else []
        checkpoints.replace(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = open(path, "ab")

    def add(self, row: LogRow) -> None:
        """Write one row; it has left this process when this returns."""
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()
        self.rows.append(row)

    def sync(self) -> None:
        """Bring the rows to the disk, before a checkpoint says that they are there."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
