"""Sends the log of a run to TensorBoard, Weights & Biases and the other trackers that accelerate knows."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ....core.json_values import parse_json
from ..errors import TrainingError
from .checkpoints import replace
from .journal import LogRow

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "goldsmith"
IDS = "trackers.json"  # in --output: the identifiers under which trackers know this run
FOLDER = "tensorboard"  # in --output: event files, and what other trackers write to a folder
NAMES = {  # as transformers' Trainer and TRL's SFTTrainer name them
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "tokens": "train/tokens",
    "tokens_per_s": "train/tokens_per_second",
    "eval_loss": "eval/loss",
    "eval_perplexity": "eval/perplexity",
    "eval_mean_token_accuracy": "eval/mean_token_accuracy",
}


def check(names: Sequence[str]) -> None:
    """Raises TrainingError for a tracker that accelerate does not know, or whose package is not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise TrainingError(f"--report-to is {name}; known are {', '.join(known)}.")
        if name not in available:
            raise TrainingError(f"--report-to {name}: its package is not installed: pip install {name}.")
    if len(set(names)) < len(names):
        raise TrainingError(f"--report-to {','.join(names)} names a tracker twice.")


class RunTrackers:
    """The trackers of one run. If a tracker fails, `note` gets a message, and training continues without it."""

    def __init__(self, names: Sequence[str], output: Path, note: Callable[[str], None]):
        self.names, self.output, self.note = names, output, note
        self._running: dict[str, GeneralTracker] = {}

    def start(self, options: Mapping[str, object], done: int) -> None:
        """Starts the trackers of a run that continues after step `done`."""
        if not self.names:
            return
        from accelerate import PartialState

        PartialState()  # accelerate's loggers need it
        for name in self.names:
            self._attempt(name, partial(self._start, name, options, done))

    def _start(self, name: str, options: Mapping[str, object], done: int) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS[name]
        project = os.environ.get("WANDB_PROJECT", PROJECT) if name == "wandb" else PROJECT
        arguments: dict[str, object] = {}
        if name == "tensorboard":
            project, arguments = FOLDER, {"logging_dir": str(self.output)}
            arguments["purge_step"] = done + 1 if done else None  # a killed run may have logged later steps
        elif name == "wandb":  # the same run goes on in the same folder
            arguments = {"name": self.output.resolve().name, "dir": str(self.output)}
            arguments |= {"id": self._wandb_id(), "resume": "allow"}
        elif kind.requires_logging_directory:
            arguments = {"logging_dir": str(self.output / FOLDER)}
        tracker = kind(project, **arguments)
        tracker.start()
        tracker.store_init_configuration({name: _simple(value) for name, value in options.items()})
        self._running[name] = tracker

    def _wandb_id(self) -> str:
        """The identifier of the run in this folder. A new run moves the old files away and gets a new one."""
        path = self.output / IDS
        if not path.exists():
            replace(path, json.dumps({"wandb": secrets.token_hex(6)}) + "\n")
        return str(parse_json(path.read_bytes())["wandb"])

    def row(self, row: LogRow) -> None:
        """Logs a row of the log, under the names that transformers' Trainer uses."""
        values = {NAMES[name]: value for name, value in row.items() if name in NAMES}
        for name, tracker in list(self._running.items()):
            self._attempt(name, partial(tracker.log, values, step=row["step"]))

    def finish(self) -> None:
        for name, tracker in list(self._running.items()):
            self._attempt(name, tracker.finish)
        self._running = {}

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        """Calls the tracker; if it fails, drops it."""
        try:
            action()
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            self._running.pop(name, None)
            self.note(
                f"--report-to {name} failed ({error}); the run continues without it, and log.jsonl has every row."
            )


def _simple(value: object) -> object:
    """A value of a kind that every tracker stores."""
    return value if isinstance(value, int | float | str | bool) else str(value)
