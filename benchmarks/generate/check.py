"""Whether an engine computes the plain model: its logits against the golden in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from goldsmith.assay.judge.ladder import QUALITY_RATIO

from .arithmetic import Arithmetic
from .processes import EngineProcess

MEMBERS = 3  # plain models with random roundings for each arithmetic
TOKENS = 32

Logits = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """error: the median over tokens of |logits - golden| / |golden|; honest: the largest of the models that round.

    The median, because where two router scores tie an honest rounding takes another expert.
    """

    error: float
    honest: float

    @property
    def agrees(self) -> bool:
        return bool(self.error <= QUALITY_RATIO * self.honest)

    def __str__(self) -> str:
        return f"logits within {self.error:.1e} of float64; honest roundings {self.honest:.1e}"


@dataclass
class Judge:
    """The golden logits of a file, and the errors of plain models in each arithmetic, computed once."""

    process: EngineProcess
    folder: Path
    ids: Sequence[int]
    honest: dict[Arithmetic, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        file = self.folder / "golden.bin"
        self.process.ask("golden", file, self.ids)
        self.golden = self._read(file, np.float64)

    def prepare(self, arithmetic: Arithmetic) -> None:
        """Run the plain models of this arithmetic, unless that was done."""
        if arithmetic not in self.honest:
            file, errors = self.folder / "random.bin", []
            for seed in range(MEMBERS):
                self.process.ask("random", f"{file},{seed},{arithmetic}", self.ids)
                errors.append(self._error(self._read(file, np.float32)))
            self.honest[arithmetic] = max(errors)

    def judge(self, engine: EngineProcess, arithmetic: Arithmetic) -> Agreement:
        file = self.folder / "logits.bin"
        engine.ask("logits", file, self.ids)
        return Agreement(self._error(self._read(file, np.float32)), self.honest[arithmetic])

    def _read(self, file: Path, dtype: type) -> Logits:
        return np.fromfile(file, dtype).astype(np.float64).reshape(len(self.ids), -1)

    def _error(self, logits: Logits) -> float:
        """NaN, which agrees with nothing, where the sizes differ."""
        if logits.shape != self.golden.shape:
            return float("nan")
        return float(np.median(np.linalg.norm(logits - self.golden, axis=1) / np.linalg.norm(self.golden, axis=1)))
