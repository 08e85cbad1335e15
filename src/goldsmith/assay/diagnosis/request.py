"""Request: what a diagnosis is asked for, and checks with its seed, device and probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import probes as catalogue
from ..checks import examine
from ..declare.case import Case
from ..declare.target import Target
from ..judge.examination import Examination
from ..report.check_report import Report
from .clock import CHECKING, Clock


@dataclass(frozen=True)
class Request:
    """cases: in the order in which they are tried. dtype: of the inputs; None: each of the target's dtypes."""

    target: Target
    cases: list[Case]
    dtype: torch.dtype | None
    device: str | torch.device
    seed: int
    selected: frozenset[str]
    clock: Clock

    @property
    def quick(self) -> frozenset[str]:
        """The cheap ones of the selected probes."""
        return self.selected & frozenset(catalogue.QUICK)

    @property
    def share(self) -> float | None:
        """Seconds for one check."""
        return None if self.clock.seconds is None else CHECKING / 2 * self.clock.seconds

    def check(
        self, cases: Sequence[Case], dtype: torch.dtype | None = None, *, probes: frozenset[str] | None = None,
        target: Target | None = None,
    ) -> tuple[Report, list[Examination]]:  # fmt: skip
        """Checks cases until one fails, with the cheap probes unless others are named."""
        probes = self.quick if probes is None else probes
        return examine(
            target or self.target, list(cases), dtype or self.dtype, self.device, self.seed, probes, self.share,
            until_failing=True,
        )  # fmt: skip
