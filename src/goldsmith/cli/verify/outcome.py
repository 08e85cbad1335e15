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
    from .checks import Check


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
    limit: float = 120.0  # seconds after which ranks, or calls of a user's kernel, that do not answer are reported
    step_limit: float = 300.0  # the same for steps of the user's own code beside the judge: import, inputs, golden


@dataclass
class VerifyOutcome:
    """All checks of one run, with the conditions under which they ran."""

    checks: list[Check]
    machine: MachineFacts
    seconds: float = 0.0
    interrupted: bool = False
    device: str = "cpu"
    remarks: list[str] = field(default_factory=list)
    broken: str = ""  # why no worker process was left, if the run ended early
    size: str = "default"

    @property
    def entries(self) -> list[Entry]:
        return [c.entry() for c in self.checks]

    @property
    def isa(self) -> str | None:
        """The instruction set level at which native kernels ran, because a check holds for that level only."""
        return native.isa() if any(c.backend == "native" and c.reports for c in self.checks) else None

    @property
    def status(self) -> int:
        entries = self.entries
        if any(e.failed for e in entries):
            return 1
        if self.interrupted:
            return INTERRUPTED
        if self.broken or any(c.problem for c in self.checks):
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
                    "how": c.how,
                    "verdict": e.verdict,
                    "reason": e.reason,
                    "left_out": c.left_out,
                    "report": e.report.to_json() if e.report else None,
                }
                for c, e in zip(self.checks, entries, strict=True)
            ],
        }
