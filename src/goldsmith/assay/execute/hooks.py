"""What a test runner or a command line sets around checks: the seed of those that name none, and who is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..declare.case import Case
from ..declare.target import Target
from ..report.check_report import Report
from ..report.results import Finding


@dataclass(frozen=True)
class CheckRecord:
    """One call of `check`, and what came of it."""

    target: Target
    case: Case | str | None
    dtype: torch.dtype | None
    device: str | torch.device
    report: Report


@dataclass
class RunInProgress:
    """A run of the candidate that has begun, and what was found in its case before."""

    case: str
    probe: str
    run: str
    seed: int
    found: list[Finding]
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class TakesTooLong(KeyboardInterrupt):
    """Raised inside a run that somebody else has lost patience with; where: the line that it stood at, in words."""

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.where = where


DEFAULT_SEED = [0]  # of checks and diagnoses that name no seed
RUNS: list[Callable[[str, str, str], None]] = []  # told of every run before it begins: its case, probe and name
ENDED: list[Callable[[], None]] = []  # told of every run when it is over
STOPPED: list[Callable[[RunInProgress, str], None]] = []  # told of a run that took too long, and of where it stood
RUNNING: list[RunInProgress] = []  # the run that has begun and is not over, if there is one
CHECKS: list[Callable[[CheckRecord], None]] = []  # told of every check when its report is made, before it raises


@contextmanager
def running(case: str, probe: str, run: str, seed: int, found: list[Finding]) -> Iterator[None]:
    """Around every run: tells that it begins and that it is over, whatever comes of it."""
    now = RunInProgress(case, probe, run, seed, found)
    RUNNING.append(now)
    try:
        for told in RUNS:
            told(case, probe, run)
        yield
    except TakesTooLong as error:
        for stopped in STOPPED:
            stopped(now, error.where)
        raise
    finally:
        RUNNING.remove(now)
        for over in ENDED:
            over()


def seed_of(given: int | None) -> int:
    return DEFAULT_SEED[0] if given is None else given
