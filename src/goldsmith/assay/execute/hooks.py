"""Hooks of test runners and commands: the default seed, and callbacks for runs and checks."""

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
    """One call of `check` with its report."""

    target: Target
    case: Case | str | None
    dtype: torch.dtype | None
    device: str | torch.device
    report: Report


@dataclass
class RunInProgress:
    """A run of the candidate that has begun, and the earlier findings of its case."""

    case: str
    probe: str
    run: str
    seed: int
    findings: list[Finding]
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class TakesTooLong(KeyboardInterrupt):
    """Raised from outside inside a run that takes too long; where: a description of the line it had reached."""

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.where = where


DEFAULT_SEED = [0]  # for checks and diagnoses without a seed
RUNS: list[Callable[[str, str, str], None]] = []  # called before every run with its case, probe and name
ENDED: list[Callable[[], None]] = []  # called after every run
STOPPED: list[
    Callable[[RunInProgress, str], None]
] = []  # called for a run that took too long, with the line it had reached
RUNNING: list[RunInProgress] = []  # the current run, if there is one
CHECKS: list[Callable[[CheckRecord], None]] = []  # called with every report, before check raises


@contextmanager
def running(case: str, probe: str, run: str, seed: int, findings: list[Finding]) -> Iterator[None]:
    """Context of every run: calls the hooks before it and after it, however it ends."""
    now = RunInProgress(case, probe, run, seed, findings)
    RUNNING.append(now)
    try:
        for report_start in RUNS:
            report_start(case, probe, run)
        yield
    except TakesTooLong as error:
        for report_stop in STOPPED:
            report_stop(now, error.where)
        raise
    finally:
        RUNNING.remove(now)
        for report_end in ENDED:
            report_end()


def seed_of(seed: int | None) -> int:
    return DEFAULT_SEED[0] if seed is None else seed
