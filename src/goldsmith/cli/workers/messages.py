"""The messages between a command and its workers: one JSON object a line in either direction."""

from __future__ import annotations

from typing import Literal, TypedDict

from ..json_types import JsonObject, MachineFacts


class PlacementRequest(TypedDict):
    """Where candidates should run: `--device`, or None, and `--interpret`."""

    device: str | None
    interpret: bool


class ListRequest(PlacementRequest):
    """List the checks behind these names."""

    do: Literal["list"]
    names: list[str]
    backend: str | None
    dtype: str | None
    size: str
    ranks: int | None


class JobMessage(TypedDict):
    """`verify.selection.Job` as JSON."""

    case: str
    dtype: str
    label: str
    probes: list[str] | None
    cost: float
    layout: str


class CheckRequest(JobMessage):
    """Run one case of a check."""

    do: Literal["check"]
    check: int
    source: str
    index: int
    name: str
    backend: str
    device: str
    seed: int
    ranks: int | None
    limit: float


class DiagnosisRequest(PlacementRequest):
    """Diagnose a target, or replay a bundle."""

    do: Literal["diagnose", "replay"]
    name: str
    backend: str | None
    case: str | None
    dtype: str | None
    budget: float | None
    seed: int
    out: str | None
    bundle: str | None
    html: str | None
    json: bool
    patch: bool
    apply: str | None
    propose: str | None
    limit: float | None


class EndRequest(TypedDict):
    """End what outlives a check: the ranks, which would wait for more."""

    do: Literal["end"]


WorkerRequest = ListRequest | CheckRequest | DiagnosisRequest | EndRequest


class ListedCheck(TypedDict):
    """`verify.checks.Check` as JSON, before any of its jobs ran."""

    operator: str
    backend: str
    device: str
    jobs: list[JobMessage]
    left_out: list[tuple[int, str]]
    how: str
    reason: str
    source: str
    index: int


class RunMessage(TypedDict, total=False):
    """A run of the candidate; `seconds` is the time that it was allowed, if it was stopped for taking longer."""

    case: str
    probe: str
    run: str
    seed: int
    seconds: float


class ProgressMessage(RunMessage, total=False):
    """The beginning of an import or a run (with the findings so far), the end of either, or a search at work."""

    importing: str
    searching: str
    runs: int
    findings: list[JsonObject]
    over: int


class FailureReply(TypedDict, total=False):
    """A mistake of the user's, what the candidate raised to end the program, or a failure of the assay itself."""

    problem: str
    ended: str
    where: str
    broken: str
    trace: str


class ListReply(FailureReply, total=False):
    checks: list[ListedCheck]
    machine: MachineFacts
    device: str


class CheckReply(FailureReply, total=False):
    """A report, or why there is none; `memory`: memory ran out, with or without a report."""

    report: JsonObject
    interpreted: bool
    skipped: str
    memory: str


class DiagnosisReply(FailureReply, total=False):
    """The text to print, the pages written, and what could not be written (`lost`)."""

    text: str
    lost: list[str]
    verdict: str
    answer: str
    partial: str
    interrupted: bool
    pages: list[str]
    json: JsonObject | None


class DeathFacts(TypedDict):
    """How a candidate's process ended, and what it printed last, as `pool.Died`."""

    how: str
    stderr: str
    signal: int
    ended: str


class WorkerReply(ListReply, CheckReply, DiagnosisReply, total=False):
    """Any reply; `ready`, `step` and `progress` are sent unasked."""

    died: DeathFacts
    ready: bool
    step: str
    progress: ProgressMessage
