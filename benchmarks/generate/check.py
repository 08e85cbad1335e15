"""Whether an engine computes the plain model: its logits against the golden in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from goldsmith.assay.judge.ladder import QUALITY_RATIO

from .engines.arithmetic import Arithmetic
from .engines.processes import EngineProcess

MEMBERS = 2  # plain models with random roundings for each arithmetic
SEQUENCES, TOKENS = 7, 12  # short ones: one tie of router scores spoils all later tokens of its sequence

Logits = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """error: |logits - golden| / |golden|, the median over sequences; honest: that of models that round.

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
    """The golden logits of a file, and the errors of plain models in each arithmetic, computed once

    ids   of sequences of the same length
    """

    process: EngineProcess
    folder: Path
    ids: Sequence[Sequence[int]]
    honest: dict[Arithmetic, float] = field(default_factory=dict)
    golden: dict[str, list[Logits]] = field(default_factory=dict)  # by the format to which the dense part is packed

    def prepare(self, arithmetic: Arithmetic) -> None:
        """Run the plain models of this arithmetic, unless that was done."""
        packs = arithmetic.packs
        if packs not in self.golden:
            self.golden[packs] = self._plain("golden", packs, np.float64)
        if arithmetic not in self.honest:
            errors = []
            for seed in range(MEMBERS if arithmetic.is_random else 1):
                errors += self._errors(self._plain("random", f"{seed},{arithmetic}", np.float32), packs)
            self.honest[arithmetic] = float(np.median(errors))

    def judge(self, engine: EngineProcess, arithmetic: Arithmetic) -> Agreement:
        file, logits = self.folder / "logits.bin", []
        for ids in self.ids:
            engine.ask("logits", file, ids)
            logits.append(np.fromfile(file, np.float32).astype(np.float64).reshape(len(ids), -1))
        return Agreement(float(np.median(self._errors(logits, arithmetic.packs))), self.honest[arithmetic])

    def _plain(self, verb: str, words: str, dtype: type) -> list[Logits]:
        """[tokens, vocabulary] of each sequence, by a plain model that computes all of them at once."""
        file, rows, tokens = self.folder / "logits.bin", len(self.ids), len(self.ids[0])
        self.process.ask(verb, f"{file},{rows},{words}", [i for ids in self.ids for i in ids])
        return list(np.fromfile(file, dtype).astype(np.float64).reshape(rows, tokens, -1))

    def _errors(self, logits: list[Logits], packs: str) -> list[float]:
        """NaN, which agrees with nothing, where the sizes differ."""
        return [_relative(one, other) for one, other in zip(logits, self.golden[packs], strict=True)]


def _relative(logits: Logits, golden: Logits) -> float:
    if logits.shape != golden.shape:
        return float("nan")
    return float(np.linalg.norm(logits - golden) / np.linalg.norm(golden))
