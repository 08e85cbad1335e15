"""Rows of `goldsmith bench generate`: one engine, one model, one precision, with the conditions of the run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from goldsmith.cli.bench.rows import Conditions, load, rounded

SCHEMA = 1


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
class GenerateRow:
    """What was measured of one engine; without rates, `note` has the reason.

    format, dense   of the experts and of all other matrices, in the file; dense_used: as the engine computed
    read_bytes      of weights, for one token; share_of_read: these over the token's time at the measured read rate
    memory          bytes: stated before the engine started; resident after its last turn; peak, loading included
    together        whether all engines were loaded at once; otherwise each was loaded anew for each of its rounds
    parts           seconds of a token in each part of the model, from a separate run with hooks
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
    prompt_tokens: int = 0
    decode_tokens: int = 0
    prompt: Rate | None = None
    decode: Rate | None = None
    verified: bool | None = None
    verified_by: str = ""
    error: float | None = None
    honest: float | None = None
    read_bytes: int | None = None
    read_gb_s: float | None = None
    share_of_read: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    together: bool = True
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""
    threads: int | None = None
    machine: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    command: str = ""
    load: float | None = field(default_factory=load)
    op: str = "generate"
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return {k: _rounded(v) for k, v in asdict(self).items() if k == "commit" or v not in (None, "", {})}

    def under(self, conditions: Conditions, versions: dict[str, str], command: str) -> GenerateRow:
        return replace(
            self, machine=conditions.machine, device=conditions.device, versions=conditions.versions | versions,
            commit=conditions.commit, date=conditions.date, command=command,
        )  # fmt: skip


def _rounded(value: object) -> object:
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else rounded(value)
