"""What a training run is refused with, or ends with."""

from __future__ import annotations


class TrainingError(Exception):
    """Something that the user can put right; the message is one readable paragraph."""


class DataError(TrainingError):
    """A file or a row that cannot be trained on; names the file, the line and the reason."""

    def __init__(self, path: object, reason: str, line: int | None = None):
        super().__init__(f"{path}{f', line {line}' if line is not None else ''}: {reason}")


class Diverged(TrainingError):
    """The loss or its gradient is not finite; names the step and the first module whose result is not."""
