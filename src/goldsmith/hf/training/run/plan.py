"""How many steps a run takes, and of how many rows each."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import Options
from .schedule import Schedule, warmup_steps


@dataclass(frozen=True)
class TrainingPlan:
    """How much is trained on: `steps` windows of `grad_accum` batches of `batch_size` rows, `limit` rows at most."""

    steps: int
    batch_size: int
    grad_accum: int
    schedule: Schedule
    limit: int | None = None
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0

    @property
    def window(self) -> int:
        """Rows of one step."""
        return self.batch_size * self.grad_accum


def plan(options: Options, rows: int) -> TrainingPlan:
    """How many steps that makes of so many rows."""
    limit = None
    if options.steps is not None:
        total = options.steps
    else:
        limit = rows * (options.epochs or 1)
        total = -(-limit // (options.batch_size * options.grad_accum))
    return TrainingPlan(
        steps=total,
        batch_size=options.batch_size,
        grad_accum=options.grad_accum,
        schedule=Schedule(options.schedule, options.lr, warmup_steps(options.warmup, total), total),
        limit=limit,
        max_grad_norm=options.max_grad_norm,
        weight_decay=options.weight_decay,
    )
