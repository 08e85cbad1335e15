"""The folder that a run writes to: no model's, and nothing in it that the run reads."""

from __future__ import annotations

from pathlib import Path

from ..errors import TrainingError
from ..options import Options
from ..records.checkpoints import UNFINISHED
from .session import CHECKPOINTS, FILES

MODEL = "config.json"  # what transformers knows the folder of a model by
FOLDERS = (CHECKPOINTS, f"{UNFINISHED}adapter")  # of which a run removes what it needs no more


def check(options: Options, model: Path) -> None:
    """Raises TrainingError, before anything is written, where the run would change or mix what it reads.

    An adapter beside a model's config.json is put onto that model by whoever loads it from there; and written into
    MODEL's own folder it would alter what a checkpoint knows MODEL by, so that the run could not go on.
    """
    output = Path(options.output)
    if _same(output, model):
        raise TrainingError(
            f"--output {output} is MODEL's own folder: an adapter there would be taken for a part of the model. "
            f"Give another, for instance {output / 'finetuned'}."
        )
    if (output / MODEL).exists():
        raise TrainingError(
            f"--output {output} holds a {MODEL}, as a model's folder does: an adapter there would be taken for a part "
            f"of that model. Give another, for instance {output / 'finetuned'}."
        )
    for name, path in (("MODEL", model), ("--data", Path(options.data)), ("--eval-data", options.eval_data)):
        if path is not None and (what := _own(output, Path(path))):
            raise TrainingError(
                f"{name} {path} is in --output {output}, as {what}, which this run writes itself. "
                "Give another --output."
            )


def _own(output: Path, path: Path) -> str | None:
    """What of a run's own files or folders `path` is, or is in."""
    inside = (path.resolve(), *path.resolve().parents)
    for name in FOLDERS:
        if (output / name).resolve() in inside:
            return name
    return next((name for name in FILES if _same(output / name, path)), None)


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)
