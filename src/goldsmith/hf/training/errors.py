"""Errors that refuse or end a training run."""

from __future__ import annotations

from ...core.messages import about, sentence


class TrainingError(Exception):
    """A problem that the user can fix; the message is one readable paragraph."""


class DataError(TrainingError):
    """A file or a row that cannot be used for training; names the file, the line (or row) and the reason."""

    def __init__(self, path: object, reason: str, line: int | None = None, unit: str = "line"):
        super().__init__(f"{path}{f', {unit} {line}' if line is not None else ''}: {reason}")


class MissingPackage(TrainingError):
    """An optional package is not installed; the message has the command that installs it."""

    def __init__(self, use: str, package: str):
        super().__init__(f"{use} {package}, which is not installed: pip install 'goldsmith[train]'.")


OPTIONS = ("format", "group_size", "partitions", "rank", "alpha", "dropout", "dtype", "device")


def about_model(name: str, error: BaseException) -> TrainingError:
    """An error about the model, or about an option that does not suit it, as the command's sentence."""
    return TrainingError(about("MODEL", name, sentence(error, OPTIONS)))


class Diverged(TrainingError):
    """The loss or its gradient is not finite; names the step and the first module with a non-finite result."""
