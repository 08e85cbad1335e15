"""Checks the output folder: it must not be a model's folder, nor hold files that the run reads."""

from __future__ import annotations

from pathlib import Path

from ..errors import TrainingError
from ..options import Options
from ..records.checkpoints import UNFINISHED
from .session import CHECKPOINTS, FILES

MODEL = "config.json"  # the file by which transformers recognises a model's folder
FOLDERS = (CHECKPOINTS, f"{UNFINISHED}adapter")  # folders in which a run removes files


def check(options: Options, model: Path) -> None:
    """Raises TrainingError, before anything is written, if the run would change or mix up what it reads.

    An adapter next to a model's config.json is applied to that model by whatever loads it from there. Written into
    MODEL's own folder it would change the fingerprint by which a checkpoint recognises MODEL, so the run could not
    resume.
    """
    output = Path(options.output)
    if _same(output, model if model.is_dir() else model.parent):
        raise TrainingError(
            f"--output {output} is MODEL's own folder: an adapter there would be mistaken for part of the model. "
            f"Give another, for instance {output / 'finetuned'}."
        )
    if (output / MODEL).exists():
        raise TrainingError(
            f"--output {output} contains a {MODEL}, like a model's folder: an adapter there would be mistaken for part "
            f"of that model. Give another, for instance {output / 'finetuned'}."
        )
    data = [("--data", Path(name)) for name in options.data]
    held_out = [("--eval-data", Path(name)) for name in options.eval_data]
    for name, path in (("MODEL", model), *data, *held_out):
        if name_inside := _own(output, path):
            raise TrainingError(
                f"{name} {path} is in --output {output}, as {name_inside}, which this run writes itself. "
                "Give another --output."
            )


def _own(output: Path, path: Path) -> str | None:
    """The run's own file or folder that `path` is, or is in; None if there is none."""
    inside = (path.resolve(), *path.resolve().parents)
    for name in FOLDERS:
        if (output / name).resolve() in inside:
            return name
    return next((name for name in FILES if _same(output / name, path)), None)


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)
