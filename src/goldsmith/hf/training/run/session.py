"""A run from its folder to its folder: begins or goes on, logs, evaluates, saves, and ends in order however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ....experts.files import in_the_way
from ...adapter.files import CONFIG, WEIGHTS
from ..data.packing import RowStream
from ..errors import TrainingError
from ..records import checkpoints
from ..records.checkpoints import TrainingCheckpoint
from ..records.journal import Journal, LogRow, rows
from .identity import changes
from .trainer import Trainer

LOG, CHECKPOINTS, LOCK = "log.jsonl", "checkpoints", ".lock"
FILES = (LOG, LOCK, "run.json", "loss.html", WEIGHTS, CONFIG)  # what a run writes beside its checkpoints


@dataclass
class RunCallbacks:
    """Whom a session tells what happens; each may be left as it is."""

    begun: Callable[[], None] = lambda: None  # what an earlier run left is out of the way
    row: Callable[[LogRow], None] = lambda row: None
    saved: Callable[[list[LogRow]], None] = lambda rows: None  # the log's, after a checkpoint
    note: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False


@dataclass
class TrainingSession:
    """What is written where, and how often. `identity` is what a checkpoint must agree with."""

    output: Path
    identity: Mapping[str, object]
    circumstances: Mapping[str, object] = field(default_factory=dict)  # threads, device, versions: they alter rounding
    save_every: int = 50
    eval_every: int = 0
    keep: int = 2
    resume: str = field(default="auto", init=False)  # as find was told

    @property
    def checkpoints(self) -> Path:
        return self.output / CHECKPOINTS

    def find(self, resume: str, watcher: RunCallbacks) -> TrainingCheckpoint | None:
        """The checkpoint to go on from, or None; refuses one of a run with other options, by their names."""
        self.resume = resume
        if resume == "never":
            return None
        if resume == "auto":
            found, wrong = checkpoints.newest(self.checkpoints)
            for text in wrong:
                watcher.note(f"Passed over: {text}.")
        else:
            found = checkpoints.read(Path(resume))
        if found is None:
            return None
        different = changes(found.facts["identity"], self.identity)
        if different:
            raise TrainingError(
                f"{found.path} is of a run that differs in what alters the result: {'; '.join(different)}. "
                "Give the options of that run, another --output, or --resume never to begin anew."
            )
        for name, value in self.circumstances.items():
            before = found.facts["circumstances"].get(name, value)  # of an older version, which did not write it
            if before != value:
                watcher.note(f"{name} was {before} and is {value}: the run goes on, but not bit for bit.")
        return found

    def run(
        self,
        trainer: Trainer,
        watcher: RunCallbacks,
        *,
        start: TrainingCheckpoint | None = None,
        evaluation: RowStream | None = None,
    ) -> list[LogRow]:
        """Train to the end of the plan, or until `watcher.stop`; returns the rows of the log.

        A step is logged, then evaluated, then saved: what a checkpoint knows stands in the log before it does.
        """
        try:
            return self._run(trainer, watcher, start, evaluation)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            raise TrainingError(self._unwritten(trainer, error)) from error

    def _run(
        self,
        trainer: Trainer,
        watcher: RunCallbacks,
        start: TrainingCheckpoint | None,
        evaluation: RowStream | None,
    ) -> list[LogRow]:
        own = start is not None and start.path.parent.resolve() == self.checkpoints.resolve()
        earlier = None if start is None or own else rows(_run_of(start.path) / LOG)
        self.output.mkdir(parents=True, exist_ok=True)
        if start is not None:
            self._restore(trainer, start)
        self._put_away(start.step if start is not None and own else None, watcher)
        watcher.begun()
        checkpoints.prune(self.checkpoints, self.keep)
        journal = Journal(self.output / LOG, trainer.done, earlier)
        saved = trainer.done if start is not None else -1
        try:
            if trainer.done == 0 and evaluation is not None:
                self._evaluate(trainer, evaluation, journal, watcher)
            while trainer.done < trainer.plan.steps and not watcher.stop():
                row = trainer.step()
                journal.add(row)
                watcher.row(row)
                if evaluation is not None and self._due(trainer, self.eval_every):
                    self._evaluate(trainer, evaluation, journal, watcher)
                if self._due(trainer, self.save_every):
                    saved = self._save(trainer, journal, watcher)
            if saved < trainer.done and trainer.done > 0:
                self._save(trainer, journal, watcher)
        finally:
            journal.close()
        return journal.rows

    def _due(self, trainer: Trainer, every: int) -> bool:
        return trainer.done == trainer.plan.steps or every > 0 and trainer.done % every == 0

    def _evaluate(self, trainer: Trainer, stream: RowStream, journal: Journal, watcher: RunCallbacks) -> None:
        row: LogRow = {"step": trainer.done, "eval_loss": trainer.evaluate(stream)}
        journal.add(row)
        watcher.row(row)

    def _save(self, trainer: Trainer, journal: Journal, watcher: RunCallbacks) -> int:
        journal.sync()
        facts = {
            "identity": dict(self.identity),
            "circumstances": dict(self.circumstances),
            "row": trainer.done * trainer.plan.window,
            "schedule": vars(trainer.plan.schedule),
        }
        checkpoints.write(self.checkpoints, trainer.done, trainer.state(), facts)
        checkpoints.prune(self.checkpoints, self.keep)
        watcher.saved(journal.rows)
        return trainer.done

    def _unwritten(self, trainer: Trainer, error: OSError) -> str:
        before = checkpoints.steps(self.checkpoints)
        last = f"the checkpoint of step {before[-1]} is whole" if before else "there is no checkpoint yet"
        return (
            f"After step {trainer.done}, {self.output} could not be written: {error.strerror or error}; {last}. "
            f"Put that right (is the disk full?), and {again(self.output, self.resume)} goes on from there."
        )

    def _restore(self, trainer: Trainer, start: TrainingCheckpoint) -> None:
        try:
            trainer.restore(start.tensors, start.step)
        except ValueError as error:
            raise TrainingError(f"{start.path} does not fit this model: {error}.") from error

    def _put_away(self, step: int | None, watcher: RunCallbacks) -> None:
        """Move what this run does not go on from out of its way, laid out as it is; nothing is lost.

        That is all of another run (None), also of one that a kill ended before its first checkpoint; or of this one the
        checkpoints after `step`, with what was made of them.
        """
        found = [k for k in checkpoints.steps(self.checkpoints) if step is None or k > step]
        names = [name for name in FILES if name != LOCK and (name != LOG or step is None)]
        if not found and (step is not None or not any((self.output / name).exists() for name in names)):
            return
        number = 1
        while (away := self.output / f"earlier-{number}").exists():
            number += 1
        away.mkdir()
        if found:
            (away / CHECKPOINTS).mkdir()
        if step is not None and (self.output / LOG).exists():  # its first rows are this run's as well
            shutil.copy2(self.output / LOG, away / LOG)
        for name in [*(f"{CHECKPOINTS}/step-{k:06d}" for k in found), *names]:
            if (self.output / name).exists():
                os.rename(self.output / name, away / name)
        watcher.note(f"What {self.output} held of an earlier run is now in {away}.")


def again(output: Path, resume: str) -> str:
    """What goes on from the last checkpoint of a run that has begun: --resume never or PATH would begin once more."""
    saved = resume != "auto" and checkpoints.steps(output / CHECKPOINTS)
    return f"the same command without --resume {resume}" if saved else "the same command"


def _run_of(path: Path) -> Path:
    """The folder of the run that a checkpoint is of; `path` or its folder `checkpoints` may be a link."""
    for place in (Path(os.path.abspath(path)), path.resolve()):
        if place.parent.name == CHECKPOINTS:
            return place.parent.parent
    return path.resolve().parent


def lock(output: Path) -> IO[str]:
    """Holds the folder for this process until the result is closed; a kill lets go of it, too.

    Raises TrainingError when another run holds it, when it cannot be written, or when something that is no file has the
    name of one that the run will write.
    """
    try:
        for name in FILES:
            if what := in_the_way(output / name):
                raise TrainingError(f"--output {output} has {what} named {name}, where this run writes a file.")
        if (output / CHECKPOINTS).exists() and not (output / CHECKPOINTS).is_dir():
            raise TrainingError(f"--output {output} has a file named {CHECKPOINTS}, where this run makes a folder.")
        output.mkdir(parents=True, exist_ok=True)
        file = open(output / LOCK, "w")
    except OSError as error:
        raise TrainingError(f"--output {output} cannot be written: {error.strerror or error}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise TrainingError(f"Another run is writing to {output}; wait for it, or give another --output.") from error
    return file
