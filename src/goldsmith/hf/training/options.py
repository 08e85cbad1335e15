"""What a fine-tuning run is asked for, and which of it alters the result."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TrainingError
from .loop import Plan
from .schedule import KINDS, Schedule, warmup_steps

TARGETS = ("gate", "up", "down")
DTYPES = ("fp32", "bf16")
MOST_THREADS = 1024  # torch's own pool ends the process where the system refuses it a thread


@dataclass(frozen=True)
class Options:
    """One field for each option of `goldsmith finetune`, with its meaning there."""

    model: str
    data: str
    output: str
    eval_data: str | None = None
    document: str = "blank"
    train_on: str = "completion"
    format: str = "bf16"
    group_size: int | None = None
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS
    shared_a: bool = False
    dropout: float = 0.0
    lora_modules: tuple[str, ...] = ()
    train_router: bool = False
    dtype: str = "fp32"
    seq_len: int = 512
    pack: bool = True
    batch_size: int = 4
    grad_accum: int = 1
    lr: float = 2e-4
    schedule: str = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    steps: int | None = None
    epochs: int | None = None
    save_every: int = 50
    eval_every: int | None = None
    keep: int = 2
    checkpointing: bool = False
    seed: int = 0
    threads: int | None = None
    partitions: int = 1
    device: str = "cpu"
    resume: str = "auto"

    def __post_init__(self) -> None:
        for name, wanted, right in (
            ("output", "the name of a folder (. is this one)", bool(self.output)),
            ("targets", f"any of {', '.join(TARGETS)}, with commas between", self._targets_right()),
            ("dtype", " or ".join(DTYPES), self.dtype in DTYPES),
            ("schedule", ", ".join(KINDS), self.schedule in KINDS),
            ("document", "blank or whole", self.document in ("blank", "whole")),
            ("train_on", "completion or all", self.train_on in ("completion", "all")),
            ("dropout", "0 or more, below 1", 0 <= self.dropout < 1),
            ("lr", "a number above 0", 0 < self.lr < math.inf),
            ("alpha", "a number above 0", 0 < self.alpha < math.inf),
            ("warmup", "a share below 1, or a number of steps", 0 <= self.warmup < math.inf),
            ("weight_decay", "0 or more", 0 <= self.weight_decay < math.inf),
            ("max_grad_norm", "0 (no clipping) or more", 0 <= self.max_grad_norm < math.inf),
            ("seq_len", "2 or more", self.seq_len >= 2),
            ("seed", "0 or more, below 2^63", 0 <= self.seed < 2**63),
            ("threads", f"1 to {MOST_THREADS:,}", self.threads is None or 1 <= self.threads <= MOST_THREADS),
        ):
            if not right:
                given = getattr(self, name)
                shown = ",".join(given) if isinstance(given, tuple) else "empty" if given == "" else given
                raise TrainingError(f"{flag(name)} is {shown}; expected {wanted}.")
        if self.steps is not None and self.epochs is not None:
            raise TrainingError("--steps and --epochs exclude one another; give one, or neither for one epoch.")
        if not (self.targets or self.lora_modules or self.train_router):
            raise TrainingError("Nothing is to be trained: give --targets, --lora-modules or --train-router.")

    def _targets_right(self) -> bool:
        return set(self.targets) <= set(TARGETS) and len(set(self.targets)) == len(self.targets)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def plan(options: Options, rows: int) -> Plan:
    """How many steps that makes of so many rows."""
    limit = None
    if options.steps is not None:
        total = options.steps
    else:
        limit = rows * (options.epochs or 1)
        total = -(-limit // (options.batch_size * options.grad_accum))
    return Plan(
        steps=total,
        batch_size=options.batch_size,
        grad_accum=options.grad_accum,
        schedule=Schedule(options.schedule, options.lr, warmup_steps(options.warmup, total), total),
        limit=limit,
        max_grad_norm=options.max_grad_norm,
        weight_decay=options.weight_decay,
    )


ALTERING = (
    *("document", "train_on", "format", "group_size", "rank", "alpha", "targets", "shared_a", "dropout"),
    *("lora_modules", "train_router", "dtype", "seq_len", "pack", "batch_size", "grad_accum", "lr", "schedule"),
    *("weight_decay", "max_grad_norm", "seed", "partitions"),
)


def identity(options: Options, found: Plan, folder: Path) -> dict[str, Any]:
    """Everything that alters the result, by the option's name; two runs with equal identities are the same run.

    A constant rate does not depend on how many steps there will be, so such a run may be made longer.
    """
    values: dict[str, Any] = {flag(name): getattr(options, name) for name in ALTERING}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    values["--warmup"] = found.schedule.warmup
    if options.schedule != "constant" or found.limit is not None:
        values["--steps or --epochs"] = found.steps
    values["MODEL"] = fingerprint(folder)
    values["--data"] = checksum(Path(options.data))
    return values


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, each as words for a reader."""
    said = []
    for name in [*now, *(name for name in before if name not in now)]:
        if before.get(name) == now.get(name):
            continue
        if name in ("MODEL", "--data"):
            said.append(f"the content of {name} is another")
        elif name in before and name in now:
            said.append(f"{name} was {_shown(before[name])} and is {_shown(now[name])}")
        else:
            said.append(f"{name} was {'given' if name in before else 'not given'} before")
    return said


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")  # what transformers makes a model of


def fingerprint(folder: Path) -> str:
    """What tells a model's files from another's: every byte, since another revision may differ in a few of them."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in READ and path.is_file())
    digest = hashlib.sha256()
    with ThreadPoolExecutor(max(1, min(len(paths), os.cpu_count() or 1))) as readers:
        for path, found in zip(paths, readers.map(checksum, paths), strict=True):
            digest.update(f"{path.name} {found} ".encode())
    return digest.hexdigest()
