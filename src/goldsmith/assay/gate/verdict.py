"""Verdict: what the gate says about one candidate, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ..report.results import Finding, Location

ACCEPTED, WRONG, CHEATING = "accepted", "wrong", "cheating"
CRASHED, TIMED_OUT, OVER_MEMORY, REFUSED = "crashed", "timed_out", "over_memory", "refused"
STATUSES = (ACCEPTED, WRONG, CHEATING, CRASHED, TIMED_OUT, OVER_MEMORY, REFUSED)
TRICKS = (
    "constant_output", "returned_input", "reused_memory", "cached_result", "call_count", "replay_from_disk",
    "input_changed", "aliased_output", "late_write", "lazy_output", "patched_runtime", "reads_golden", "plain_torch",
    "lowered_precision", "shape_branch", "backward_shortcut", "impossible_time",
)  # fmt: skip


@dataclass
class Verdict:
    """One candidate's verdict.

    status     one of STATUSES
    reason     a short id: for cheating one of TRICKS, else the probe or the limit that decided
    case       the case that decided, or ""
    seed       the seed that its inputs were drawn with
    seconds    from the start of its process to the end
    evidence   sentences, the decisive one first
    finding    the decisive finding of the assay, or None
    diagnosis  the likeliest cause with its score or "not explained", if it is wrong and a diagnosis was asked for
    timing     `timing.measure.CallTiming` as JSON, if times were asked for and it is accepted
    """

    status: str
    reason: str = ""
    candidate: str = ""
    case: str = ""
    seed: int = 0
    seconds: float = 0.0
    evidence: list[str] = field(default_factory=list)
    finding: Finding | None = None
    diagnosis: str | None = None
    timing: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.status == ACCEPTED

    def to_json(self) -> dict[str, object]:
        data: dict[str, object] = _printable({**asdict(self), "seconds": round(self.seconds, 4)})
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        finding = data["finding"]
        if finding is not None:
            place = finding["location"]
            if place is not None:
                place = Location(**{**place, "segments": tuple(place["segments"])})
            finding = Finding(**{**finding, "location": place})
        return cls(**{**data, "finding": finding})


def _printable(value: Any) -> Any:
    """The value with "?" for halves of characters, which a candidate may print and no strict reader of JSON takes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(k): _printable(v) for k, v in value.items()}
    return [_printable(v) for v in value] if isinstance(value, list | tuple) else value
