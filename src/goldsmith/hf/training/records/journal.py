"""log.jsonl: one row for each step and each evaluation, without duplicates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Required, TypedDict, cast

from ....core.json_values import json_rows
from . import checkpoints


class LogRow(TypedDict, total=False):
    """A row of the log: of a step, or of an evaluation, which has step and the three eval_ values."""

    step: Required[int]
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    seconds: float
    eval_loss: float
    eval_perplexity: float
    eval_mean_token_accuracy: float


def rows(path: Path) -> list[LogRow]:
    """The rows of a log, without a last line that a kill cut short."""
    numbered = [row for row in json_rows(path) if isinstance(row, dict) and isinstance(row.get("step"), int)]
    return cast("list[LogRow]", numbered)


class UnwrittenJournal:
    """Rows in memory, for ranks that write nothing."""

    def __init__(self) -> None:
        self.rows: list[LogRow] = []

    def add(self, row: LogRow) -> None:
        self.rows.append(row)

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Journal(UnwrittenJournal):
    """Appends to the log after step `done`; rows of later steps, which the checkpoint does not cover, are dropped."""

    def __init__(self, path: Path, done: int, earlier: list[LogRow] | None = None):
        kept = [row for row in (rows(path) if earlier is None else earlier) if row["step"] <= done]
        self.rows = kept if done else []
        checkpoints.replace(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = open(path, "ab")

    def add(self, row: LogRow) -> None:
        """Writes one row and flushes it to the system."""
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()
        self.rows.append(row)

    def sync(self) -> None:
        """Syncs the rows to disk, before a checkpoint relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
