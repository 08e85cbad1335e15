"""The request and the outcome of one run of `goldsmith verify`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ... import __version__
from ...core import native
from ..json_types import JsonObject, MachineFacts
from ..source import digest
from ..terminal import INTERRUPTED

if TYPE_CHECKING:
    from ...assay.report.html.view import Entry
    from .proof import Proof


@dataclass(frozen=True)
class VerifyRequest:
    """The command-line options of one run."""

    names: tuple[str, ...] = ()
    backend: str | None = None
    device: str | None = None
    dtype: str | None = None
    interpret: bool = False
    size: str = "default"
    jobs: int | None = None
    seed: int = 0
    verbose: bool = False  # show every finding and note
    ranks: int | None = None  # run on so many processes
    limit: float = 120.0  # seconds after which ranks that do not answer are reported


@dataclass
class VerifyOutcome:
    """All proofs of one run, with the conditions under which they were made."""

    proofs: list[Proof]
    machine: MachineFacts
    seconds: float = 0.0
    interrupted: bool = False
    device: str = "cpu"
    remarks: list[str] = field(default_factory=list)
    broken: str = ""  # why no worker process was left, if the run ended early
    size: str = "default"

    @property
    def entries(self) -> list[Entry]:
        return [p.entry() for p in self.proofs]

    @property
    def isa(self) -> str | None:
        """The instruction set level at which native kernels ran, because a proof holds for that level only."""
        return native.isa() if any(p.backend == "native" and p.reports for p in self.proofs) else None

    @property
    def status(self) -> int:
        entries = self.entries
        if any(e.failed for e in entries):
            return 1
        if self.interrupted:
            return INTERRUPTED
        if self.broken or any(p.problem for p in self.proofs):
            return 2
        return 0 if any(e.report is not None for e in entries) else 2

    def to_json(self) -> JsonObject:
        entries = self.entries
        return {
            "schema": 1,
            "goldsmith": __version__,
            "source": digest(),
            "size": self.size,
            "isa": self.isa,
            "ok": self.status == 0,
            "interrupted": self.interrupted,
            "remarks": self.remarks,
            "seconds": round(self.seconds, 3),
            "machine": self.machine,
            "proofs": [
                {
                    "operator": e.operator,
                    "backend": e.backend,
                    "how": p.how,
                    "verdict": e.verdict,
                    "reason": e.reason,
                    "left_out": p.left_out,
                    "report": e.report.to_json() if e.report else None,
                }
                for p, e in zip(self.proofs, entries, strict=True)
            ],
        }
