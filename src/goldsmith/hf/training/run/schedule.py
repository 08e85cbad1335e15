"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Schedule:
    """Linear warmup, then a half cosine or a line to zero, or nothing.

    steps 1 .. warmup rise to `lr`; the last of `steps` is the last above zero.
    """

    kind: str
    lr: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """The rate of step 1, 2, .., steps."""
        if step <= self.warmup:
            return self.lr * step / (self.warmup + 1)
        if self.kind == "constant":
            return self.lr
        done = (step - 1 - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done)


def warmup_steps(given: float, steps: int) -> int:
    """Below 1 a share of all steps, otherwise a number of them."""
    return min(steps - 1, round(given * steps) if given < 1 else round(given))
