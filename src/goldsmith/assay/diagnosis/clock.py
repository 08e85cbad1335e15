"""The budget of a diagnosis."""

import math
import time

from ..judge.examination import Examination

CHECKING = 0.5  # share of the budget, at most, for finding a failing case
# share of the budget after which no more evidence is collected; the rest is for making the case small
COLLECTING = 0.8
SPENT = "the budget of {:g} s was spent"


class Clock:
    """Measures the budget and records what was left out.

    stage: the current step, a key of `_AFTER`; kept: a share of the budget that the steps before the last one leave
    """

    def __init__(self, seconds: float | None, kept: float = 0.0):
        self.kept = kept
        self.seconds, self.started = seconds, time.perf_counter()
        self.left_out: list[str] = []
        self.stage = "check"
        self.smallest: Examination | None = None

    @property
    def left(self) -> float:
        """Seconds of the budget, without what is kept."""
        if self.seconds is None:
            return math.inf
        return self.started + (1 - self.kept) * self.seconds - time.perf_counter()

    def spent(self, share: float = 1.0, more: float = 0.0) -> bool:
        """True if this share of the budget, without what is kept, is over, or would be after `more` seconds."""
        if self.seconds is None:
            return False
        return time.perf_counter() - self.started + more > share * (1 - self.kept) * self.seconds

    def lacks(self, what: str, share: float = 1.0, more: float = 0.0) -> bool:
        """The same, and records `what` as left out if True."""
        lacks = self.spent(share, more)
        if lacks and what not in self.left_out:
            self.left_out.append(what)
        return lacks
