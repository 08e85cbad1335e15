"""Rows of `goldsmith bench generate`: one engine, one model, one precision, with the conditions of the run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..common.rows import RunRow


@dataclass(frozen=True)
class Rate:
    """Tokens per second: the median over rounds, the slowest and the fastest round."""

    median: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, rates: Sequence[float]) -> Rate:
        return cls(statistics.median(rates), min(rates), max(rates), len(rates))

    @property
    def spread(self) -> float:
        """Half the distance from the slowest to the fastest round, as a share of the median."""
        return (self.most - self.least) / 2 / self.median


@dataclass(frozen=True)
class GenerateRow(RunRow):
    """What was measured of one engine; without rates, `note` has the reason.

    format, dense   of the experts and of all other matrices, in the file; dense_used: as the engine computed
    level           the highest instruction level that Python's engines were allowed, goldsmith's among them
    budget          bytes of GPU memory for experts, if a number was given; plan: how goldsmith assigns experts
    read_bytes      of weights, for one token; share_of_read: these over the token's time at the measured read rate
    memory          bytes: stated before the engine started; resident after its last turn; peak, loading included
    together        whether all engines were loaded at once and took turns; otherwise one followed the other
    parts           seconds of a token in each part of the native step, by its own counters; of other engines in each
                    part of the model, from a separate run with hooks
    """

    shape: str
    sizes: dict[str, int]
    all_layers: int
    format: str
    dense: str
    engine: str
    label: str
    dense_used: str = ""
    compute: str | None = None
    level: str = ""
    budget: int | None = None
    plan: str = ""
    prompt_tokens: int = 0
    decode_tokens: int = 0
    prompt: Rate | None = None
    decode: Rate | None = None
    honest: float | None = None
    read_bytes: int | None = None
    read_gb_s: float | None = None
    share_of_read: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    together: bool = True
    parts: dict[str, float] = field(default_factory=dict)
    command: str = ""
    op: str = "generate"

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> GenerateRow:
        known = {each.name for each in fields(cls)}
        rates = {name: Rate(**row[name]) for name in ("prompt", "decode") if name in row}
        return cls(**{name: value for name, value in row.items() if name in known} | rates)
