"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Schedule:
    """The learning rate: a linear warmup, then a half cosine, a line to zero, or a constant.

    It rises to `lr` in steps 1 .. warmup; the last of `steps` is the last one above zero.
    """

    kind: str
    lr: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """The learning rate of step 1, 2, .., steps."""
        if step <= self.warmup:
            return self.lr * step / (self.warmup + 1)
        if self.kind == "constant":
            return self.lr
        done = (step - 1 - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done)


def warmup_steps(warmup: float, steps: int) -> int:
    """The number of warmup steps: a share of all steps if below 1, otherwise a number of steps."""
    return min(steps - 1, round(warmup * steps) if warmup < 1 else round(warmup))
