"""A training session in its output folder: starts or resumes, logs, evaluates, saves, and always ends in order."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ....experts.packed.files import in_the_way
from ...adapter.files import CONFIG, WEIGHTS
from ..data.packing import RowStream
from ..errors import TrainingError
from ..records import checkpoints
from ..records.checkpoints import TrainingCheckpoint
from ..records.journal import Journal, LogRow, UnwrittenJournal, rows
from ..records.trackers import FOLDER, IDS
from .identity import changes
from .trainer import Trainer

LOG, CHECKPOINTS, LOCK = "log.jsonl", "checkpoints", ".lock"
FILES = (LOG, LOCK, "run.json", "loss.html", WEIGHTS, CONFIG)  # files that a run writes next to its checkpoints


@dataclass
class RunCallbacks:
    """Functions that a session calls on its events; each has a default that does nothing."""

    begun: Callable[[], None] = lambda: None  # the files of an earlier run are out of the way
    row: Callable[[LogRow], None] = lambda row: None
    saved: Callable[[list[LogRow]], None] = lambda rows: None  # after a checkpoint, with all rows of the log
    note: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False


@dataclass
class TrainingSession:
    """Where a run writes, and how often. A checkpoint must have the same `identity`."""

    output: Path
    identity: Mapping[str, object]
    circumstances: Mapping[str, object] = field(default_factory=dict)  # threads, device, versions: they affect rounding
    save_every: int = 50
    eval_every: int = 0
    keep: int = 2
    writes: bool = True  # False on all ranks but one, which train along and write nothing
    resume: str = field(default="auto", init=False)  # the argument of the last `find`

    @property
    def checkpoints(self) -> Path:
        return self.output / CHECKPOINTS

    def find(self, resume: str, callbacks: RunCallbacks) -> TrainingCheckpoint | None:
        """The checkpoint to resume from, or None; refuses a checkpoint of a run with other options, naming them."""
        self.resume = resume
        if resume == "never":
            return None
        if resume == "auto":
            start, problems = checkpoints.newest(self.checkpoints)
            for text in problems:
                callbacks.note(f"Skipped: {text}.")
        else:
            start = checkpoints.read(Path(resume))
        if start is None:
            return None
        different = changes(start.facts["identity"], self.identity)
        if different:
            raise TrainingError(
                f"{start.path} belongs to a run with different settings: {'; '.join(different)}. "
                "Give that run's options, another --output, or --resume never to start over."
            )
        for name, value in self.circumstances.items():
            before = start.facts["circumstances"].get(name, value)  # absent in checkpoints of older versions
            if before != value:
                callbacks.note(f"{name} was {before} and is {value}: the run resumes, but not bit for bit.")
        return start

    def run(
        self,
        trainer: Trainer,
        callbacks: RunCallbacks,
        *,
        start: TrainingCheckpoint | None = None,
        evaluation: RowStream | None = None,
    ) -> list[LogRow]:
        """Trains to the last step, or until `callbacks.stop()`; returns the rows of the log.

        Each step is logged, then evaluated, then saved, so the log always covers what a checkpoint contains.
        """
        try:
            return self._run(trainer, callbacks, start, evaluation)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            raise TrainingError(self._write_failure(trainer, error)) from error

    def _run(
        self,
        trainer: Trainer,
        callbacks: RunCallbacks,
        start: TrainingCheckpoint | None,
        evaluation: RowStream | None,
    ) -> list[LogRow]:
        if start is not None:
            self._restore(trainer, start)
        journal = self._begin(trainer, callbacks, start) if self.writes else UnwrittenJournal()
        saved = trainer.done if start is not None else -1
        try:
            if trainer.done == 0 and evaluation is not None:
                self._evaluate(trainer, evaluation, journal, callbacks)
            while trainer.done < trainer.training.steps and not callbacks.stop():
                row = trainer.step()
                journal.add(row)
                callbacks.row(row)
                if evaluation is not None and self._due(trainer, self.eval_every):
                    self._evaluate(trainer, evaluation, journal, callbacks)
                if self._due(trainer, self.save_every):
                    saved = self._save(trainer, journal, callbacks)
            if saved < trainer.done and trainer.done > 0:
                self._save(trainer, journal, callbacks)
        finally:
            journal.close()
        return journal.rows

    def _begin(self, trainer: Trainer, callbacks: RunCallbacks, start: TrainingCheckpoint | None) -> Journal:
        """Prepares the folder, and opens the log."""
        continues_here = start is not None and start.path.parent.resolve() == self.checkpoints.resolve()
        earlier = None if start is None or continues_here else rows(_run_of(start.path) / LOG)
        self.output.mkdir(parents=True, exist_ok=True)
        self._archive(start.step if start is not None and continues_here else None, callbacks)
        callbacks.begun()
        checkpoints.prune(self.checkpoints, self.keep)
        return Journal(self.output / LOG, trainer.done, earlier)

    def _due(self, trainer: Trainer, every: int) -> bool:
        return trainer.done == trainer.training.steps or every > 0 and trainer.done % every == 0

    def _evaluate(
        self, trainer: Trainer, stream: RowStream, journal: UnwrittenJournal, callbacks: RunCallbacks
    ) -> None:
        result = trainer.evaluate(stream)
        row: LogRow = {
            "step": trainer.done,
            "eval_loss": result.loss,
            "eval_perplexity": result.perplexity,
            "eval_mean_token_accuracy": result.accuracy,
        }
        journal.add(row)
        callbacks.row(row)

    def _save(self, trainer: Trainer, journal: UnwrittenJournal, callbacks: RunCallbacks) -> int:
        trainer.check_ranks()
        if not self.writes:
            return trainer.done
        journal.sync()
        facts = {
            "identity": dict(self.identity),
            "circumstances": dict(self.circumstances),
            "row": trainer.done * trainer.training.window,
            "schedule": vars(trainer.training.schedule),
        }
        checkpoints.write(self.checkpoints, trainer.done, trainer.state(), facts)
        checkpoints.prune(self.checkpoints, self.keep)
        callbacks.saved(journal.rows)
        return trainer.done

    def _write_failure(self, trainer: Trainer, error: OSError) -> str:
        before = checkpoints.steps(self.checkpoints)
        last = f"the checkpoint of step {before[-1]} is complete" if before else "there is no checkpoint yet"
        return (
            f"After step {trainer.done}, {self.output} could not be written: {error.strerror or error}; {last}. "
            f"Fix that (is the disk full?), and {again(self.output, self.resume)} resumes from there."
        )

    def _restore(self, trainer: Trainer, start: TrainingCheckpoint) -> None:
        try:
            trainer.restore(start.tensors, start.step)
        except ValueError as error:
            raise TrainingError(f"{start.path} does not fit this model: {error}.") from error

    def _archive(self, step: int | None, callbacks: RunCallbacks) -> None:
        """Moves files that this run does not continue from into a folder of their own; nothing is lost.

        step=None: all files of an earlier run, also of one that was killed before its first checkpoint. Otherwise: the
        checkpoints of this run after `step`, and the files made from them.
        """
        later_steps = [k for k in checkpoints.steps(self.checkpoints) if step is None or k > step]
        names = [name for name in FILES if name != LOCK and (name != LOG or step is None)]
        names += (IDS, FOLDER) if step is None else ()
        if not later_steps and (step is not None or not any((self.output / name).exists() for name in names)):
            return
        number = 1
        while (archive := self.output / f"earlier-{number}").exists():
            number += 1
        archive.mkdir()
        if later_steps:
            (archive / CHECKPOINTS).mkdir()
        if step is not None and (self.output / LOG).exists():  # copied, since its first rows also belong to this run
            shutil.copy2(self.output / LOG, archive / LOG)
        for name in [*(f"{CHECKPOINTS}/step-{k:06d}" for k in later_steps), *names]:
            if (self.output / name).exists():
                os.rename(self.output / name, archive / name)
        callbacks.note(f"The files of an earlier run in {self.output} are now in {archive}.")


def again(output: Path, resume: str) -> str:
    """In words, the command that resumes a run; repeating --resume never or --resume PATH would start it over."""
    saved = resume != "auto" and checkpoints.steps(output / CHECKPOINTS)
    return f"the same command without --resume {resume}" if saved else "the same command"


def _run_of(path: Path) -> Path:
    """The folder of the run that wrote a checkpoint; `path` or its folder `checkpoints` may be a symbolic link."""
    for place in (Path(os.path.abspath(path)), path.resolve()):
        if place.parent.name == CHECKPOINTS:
            return place.parent.parent
    return path.resolve().parent


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Locks the folder for this process while the block runs; a kill releases it too.

    If the block leaves nothing in the folder, the folder and its lock are removed as far as they were made here.
    Raises TrainingError if another run holds the lock, if the folder cannot be written, or if something other than a
    file has the name of one that the run writes.
    """
    try:
        for name in FILES:
            if kind := in_the_way(output / name):
                raise TrainingError(f"--output {output} has {kind} named {name}, where this run writes a file.")
        if (output / CHECKPOINTS).exists() and not (output / CHECKPOINTS).is_dir():
            raise TrainingError(f"--output {output} has a file named {CHECKPOINTS}, where this run needs a folder.")
        new_folders = [folder for folder in (output, *output.parents) if not folder.exists()]
        output.mkdir(parents=True, exist_ok=True)
        file = open(output / LOCK, "w")
    except OSError as error:
        raise TrainingError(f"--output {output} cannot be written: {error.strerror or error}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(output / LOCK)):
                raise BlockingIOError  # another run that ended just now has removed this file
        except (BlockingIOError, FileNotFoundError) as error:
            raise TrainingError(
                f"Another run is writing to {output}; wait for it, or give another --output."
            ) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(output) == [LOCK]:
                    os.unlink(output / LOCK)
                    for folder in new_folders:
                        folder.rmdir()
