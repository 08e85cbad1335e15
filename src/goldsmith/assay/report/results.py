"""The results of a check as data: findings, notes, one row per case, run and tensor, and small error maps.

All of it survives `Report.from_json(report.to_json())`. This module does not load torch, so that pages and commands
read reports quickly.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

CERTAIN, STATISTICAL, SYSTEMATIC, QUALITY = "CERTAIN", "STATISTICAL", "SYSTEMATIC", "QUALITY"
RUNGS = (CERTAIN, STATISTICAL, SYSTEMATIC, QUALITY)
PASS, FAIL, REFERENCE_FAULT, UNJUDGED = "pass", "fail", "reference_fault", "unjudged"
GOLDEN_RAISED = "golden_raised"  # id of the note on a probe whose own inputs the golden refuses
NOT_JUDGED = "not_judged"  # id of the note that says why a case was neither right nor wrong
NOT_NEEDED = "not_needed"  # id of the note on a run whose inputs the case's `where` excludes
NOT_RUN = "not_run"  # id of the note that says why a case did not run at all
NOTHING_COMPARED = "no result has an element, so nothing was compared; add a case whose results have elements"
SCHEMA = 1
KINDS = frozenset(
    """raised unusable no_tensor no_gradient detached shape bound nan swallowed_nan inf missing_inf noise pattern gross
    quality overrun stray_read never_written input_modified output_modified aliased overwritten_result late_write
    differs backward_twice call_differs illegal_choice wrong_side drop_rate refused_layout inexact_scaling
    nonfinite_leak swallowed leak no_influence neighbour_read patched_runtime golden process""".split()
)
MEMORY_KINDS = ("overrun", "stray_read", "output_modified", "input_modified", "aliased", "never_written")


class AssayError(AssertionError):
    """A check failed. The text is the report; `.report` is the object."""

    def __init__(self, report: ReportFacts):
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Location:
    """Where in a tensor: named segments, inclusive index ranges per axis, and the share of elements concerned."""

    tensor: str
    segments: tuple[str, ...] = ()
    axes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    fraction: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Finding:
    """One reason to reject the candidate, with the rung that says how certain it is.

    kind    what was observed, in one word of `KINDS`; the diagnosis reads this and `values`, and never the text
    run     the run that shows it ("values", "second_call", "scale 2^12", ...); "" if no single run does
    values  numbers and names of the observation, by the kind
    trick   what the finding proves beyond a wrong result, in the gate's words ("cached_result", ...), or ""
    """

    rung: str
    probe: str
    tensor: str
    location: Location | None
    measured: float | None
    limit: float | None
    text: str
    case: str = ""
    trick: str = ""
    kind: str = ""
    run: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Note:
    """An observation that is not a fault (tie, order_nondeterminism, not_proven, ...)."""

    id: str
    tensor: str
    text: str
    case: str = ""
    left_out: str = ""  # what did not run for lack of time


@dataclass(frozen=True)
class Row:
    """One tensor of one run of one case, with the figures behind its state."""

    case: str
    run: str
    tensor: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    max_error: float
    max_over_bound: float | None = None
    rms_over_noise: float | None = None
    slope: float | None = None
    slope_z: float | None = None
    ulp_p50: float | None = None
    ulp_p99: float | None = None
    ulp_max: float | None = None
    state: str = "ok"

    def not_judged(self) -> Row:
        """The row of a comparison that turned out to decide nothing: its error is no share of a bound."""
        return replace(self, state="not judged", max_over_bound=None, rms_over_noise=None)


@dataclass(frozen=True)
class ProbeRun:
    """One probe: whether it ran, why not, its time, and how many runs of the candidate it used."""

    name: str
    ran: bool
    reason: str = ""
    seconds: float = 0.0
    runs: int = 0


@dataclass(frozen=True)
class ErrorMap:
    """A tensor as three small pictures: golden, candidate and error/limit.

    Each picture has at most 128 x 128 cells. A cell is the element of largest magnitude of its block.
    """

    tensor: str
    case: str
    shape: tuple[int, int]
    golden: list[list[float]]
    candidate: list[list[float]]
    error_over_limit: list[list[float]]
    segments: dict[str, tuple[int, int]] = field(default_factory=dict)
    bad: bool = False
    run: str = "values"


@dataclass
class ReportFacts:
    """A verdict with everything that supports it, as data; `Report` adds the rendering."""

    target: str
    verdict: str = PASS
    findings: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    probes: list[ProbeRun] = field(default_factory=list)
    maps: dict[str, ErrorMap] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cases: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    device: str = "cpu"
    seed: int = 0
    strict: bool = False
    partial: str = ""
    stages: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.verdict == PASS

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values; numbers that JSON lacks become "nan", "inf" and "-inf"."""
        return {"schema": SCHEMA, **_plain(asdict(self))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"report has schema {data.get('schema')!r}; this version reads {SCHEMA}")
        data = {k: v for k, v in data.items() if k != "schema"}
        return cls(
            **{
                **data,
                "findings": [_finding(f) for f in data["findings"]],
                "notes": [Note(**n) for n in data["notes"]],
                "rows": [_row(r) for r in data["rows"]],
                "probes": [ProbeRun(**p) for p in data["probes"]],
                "maps": {k: _map(m) for k, m in data["maps"].items()},
            }
        )


def _plain(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _number(value: object) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _numbers(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**data, **{name: _number(data[name]) for name in names}}


def _finding(data: dict[str, Any]) -> Finding:
    location = data["location"]
    if location is not None:
        axes = {name: [(lo, hi) for lo, hi in ranges] for name, ranges in location["axes"].items()}
        location = Location(**{**location, "segments": tuple(location["segments"]), "axes": axes})
    return Finding(**{**_numbers(data, "measured", "limit"), "location": location})


_ROW_NUMBERS = (
    "max_error", "max_over_bound", "rms_over_noise", "slope", "slope_z", "ulp_p50", "ulp_p99", "ulp_max",
)  # fmt: skip


def _row(data: dict[str, Any]) -> Row:
    return Row(**{**_numbers(data, *_ROW_NUMBERS), "shape": tuple(data["shape"])})


def _map(data: dict[str, Any]) -> ErrorMap:
    grids = {k: [[_number(v) for v in row] for row in data[k]] for k in ("golden", "candidate", "error_over_limit")}
    segments = {name: (lo, hi) for name, (lo, hi) in data["segments"].items()}
    return ErrorMap(**{**data, **grids, "shape": tuple(data["shape"]), "segments": segments})


def nothing_compared(report: ReportFacts) -> list[Note]:
    """A note for each case of a report without findings whose results all lack elements; none if any has one."""
    if report.findings or not report.rows or any(0 not in row.shape for row in report.rows):
        return []
    return [Note(NOT_JUDGED, report.target, NOTHING_COMPARED, case, "every result") for case in report.cases]
