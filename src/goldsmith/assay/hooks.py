"""What a test runner or a command line sets around checks: the seed of those that name none, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .results import Report


@dataclass(frozen=True)
class Checked:
    """One call of `check`, and what came of it."""

    target: Any
    case: Any
    dtype: Any
    device: Any
    report: Report


DEFAULT_SEED = [0]  # of checks and diagnoses that name no seed
RUNS: list[Callable[[str, str, str], None]] = []  # told of every run before it begins: its case, probe and name
CHECKS: list[Callable[[Checked], None]] = []  # told of every check when its report is made, before it raises


def seed_of(given: int | None) -> int:
    return DEFAULT_SEED[0] if given is None else given
