"""Options: the options of a fine-tuning run, with checks of their values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import TrainingError
from .run.schedule import KINDS

TARGETS = ("gate", "up", "down")
DTYPES = ("fp32", "bf16")
MOST_THREADS = 1024  # torch aborts the process if the system cannot start a thread


@dataclass(frozen=True)
class Options:
    """One field for each option of `goldsmith finetune`, with the same meaning."""

    model: str
    data: tuple[str, ...]  # files, folders and names; one may also be given as a plain string
    output: str
    eval_data: tuple[str, ...] = ()
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
    report_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("data", "eval_data"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        for name, expected, valid in (
            ("output", "the name of a folder, or . for the current one", bool(self.output)),
            ("targets", f"one or more of {','.join(TARGETS)}, separated by commas", self._targets_are_valid()),
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
            if not valid:
                value = getattr(self, name)
                value_text = ",".join(value) if isinstance(value, tuple) else "empty" if value == "" else value
                raise TrainingError(f"{flag(name)} is {value_text}; expected {expected}.")
        if self.steps is not None and self.epochs is not None:
            raise TrainingError("--steps and --epochs exclude one another; give one, or neither for one epoch.")
        if not (self.targets or self.lora_modules or self.train_router):
            raise TrainingError("There is nothing to train: give --targets, --lora-modules or --train-router.")

    def _targets_are_valid(self) -> bool:
        return set(self.targets) <= set(TARGETS) and len(set(self.targets)) == len(self.targets)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
