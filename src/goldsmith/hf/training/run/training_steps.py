"""TrainingSteps: the number of steps of a run, the rows in each, and the learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import Options
from .schedule import Schedule, warmup_steps


@dataclass(frozen=True)
class TrainingSteps:
    """`steps` steps of `grad_accum` batches of `batch_size` rows on each rank, at most `limit` rows in total."""

    steps: int
    batch_size: int
    grad_accum: int
    schedule: Schedule
    limit: int | None = None
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    ranks: int = 1

    @property
    def window(self) -> int:
        """The number of rows of one step, on all ranks together."""
        return self.batch_size * self.grad_accum * self.ranks


def training_steps(options: Options, rows: int, ranks: int = 1) -> TrainingSteps:
    """The steps for this number of rows in the data."""
    limit = None
    if options.steps is not None:
        total = options.steps
    else:
        limit = rows * (options.epochs or 1)
        total = -(-limit // (options.batch_size * options.grad_accum * ranks))
    return TrainingSteps(
        steps=total,
        batch_size=options.batch_size,
        grad_accum=options.grad_accum,
        schedule=Schedule(options.schedule, options.lr, warmup_steps(options.warmup, total), total),
        limit=limit,
        max_grad_norm=options.max_grad_norm,
        weight_decay=options.weight_decay,
        ranks=ranks,
    )
