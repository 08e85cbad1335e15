"""TrainingPlan: the number of steps of a run, and of rows in each."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import Options
from .schedule import Schedule, warmup_steps


@dataclass(frozen=True)
class TrainingPlan:
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


def plan(options: Options, rows: int, ranks: int = 1) -> TrainingPlan:
    """The plan for this number of rows in the data."""
    limit = None
    if options.steps is not None:
        total = options.steps
    else:
        limit = rows * (options.epochs or 1)
        total = -(-limit // (options.batch_size * options.grad_accum * ranks))
    return TrainingPlan(
        steps=total,
        batch_size=options.batch_size,
        grad_accum=options.grad_accum,
        schedule=Schedule(options.schedule, options.lr, warmup_steps(options.warmup, total), total),
        limit=limit,
        max_grad_norm=options.max_grad_norm,
        weight_decay=options.weight_decay,
        ranks=ranks,
    )
