"""What the assay over ranks says about each specimen, right and wrong, beside the truth."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from goldsmith.assay.ranks import RankPool, check

from . import catalogue
from .catalogue import RankFault

LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """One specimen. named: the first cause of the wrong version; proven: whether its numbers were reproduced."""

    specimen: str
    source: str
    cause: str
    named: str
    proven: bool
    text: str
    detected: bool
    right_passes: bool
    right_text: str

    @property
    def right(self) -> bool:
        return self.named == self.cause

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def outcomes(
    ranks: int, faults: tuple[RankFault, ...] | None = None, pool: RankPool | None = None
) -> Iterator[Outcome]:
    """The outcomes, one by one; a pool that lost a rank is replaced."""
    own = pool is None
    pool = pool or RankPool(ranks, limit_s=LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults or catalogue.faults():
            reports = []
            for faulty in (True, False):
                if not pool.alive:
                    pool, own = RankPool(ranks, limit_s=LIMIT_S), True
                target = catalogue.target(fault, Path(folder), faulty=faulty)
                reports.append(check(target, pool, seed=0, raises=False))
            wrong, right = reports
            first = next(iter(wrong.environment["ranks"]["causes"]), {"cause": "", "proven": False, "text": ""})
            first_finding = right.findings[0].text if right.findings else ""
            yield Outcome(
                fault.specimen, fault.source, fault.cause, first["cause"], first["proven"], first["text"],
                not wrong.ok, right.ok, first_finding,
            )  # fmt: skip
    if own:
        pool.close()
