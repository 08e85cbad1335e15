"""find_line: traces the candidate in a child process and reads the line that goes wrong first from its answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...declare.target import Target
from ...execute.records import RunSettings
from ...gate.isolation.wire import request_of
from ...golden.golden_results import GoldenResults
from ...judge.examination import Examination
from ...probes.values import judged_reference
from ...report.results import FAIL
from ..clock import Clock
from ..source.children.child import NoAnswer, single_request
from ..source.reading.candidate_source import NoSource, candidate_source
from .faulty_line import FaultyLine
from .golden_values import golden_values

if TYPE_CHECKING:
    from ..report.result import DiagnosisFacts

SECONDS, _LEAST = 10.0, 2.0  # for the child, at most and at least
_LARGE = 20_000  # elements of the inputs of a case


class NoLine(Exception):
    """No line was found; the text says why."""


def add_line(diagnosis: DiagnosisFacts, target: Target, failing: Examination, clock: Clock) -> None:
    """Sets the line of a failing diagnosis, if there is time and one is found.

    A case of few elements is evidence of little, so that the smallest case is traced only instead of a large one.
    """
    if diagnosis.verdict == FAIL and not diagnosis.partial and not clock.lacks("the line that goes wrong first"):
        elements = sum(t.numel() for t in failing.material.inputs.values())
        case = failing if elements <= _LARGE or clock.smallest is None else clock.smallest
        diagnosis.line = find_line(target, case, min(SECONDS, max(_LEAST, clock.left)))


def find_line(target: Target, examination: Examination, seconds: float = SECONDS) -> FaultyLine | None:
    """The first line of the candidate that goes wrong in this failing case; None if nothing can be said."""
    try:
        return traced_line(target, examination, seconds)
    except NoLine:
        return None


def traced_line(target: Target, examination: Examination, seconds: float = SECONDS) -> FaultyLine:
    """The same. Raises NoLine."""
    first, ref, material = examination._first, examination._ref, examination.material
    if first is None or ref is None or first.error is not None:
        raise NoLine("the failing run has no numbers")
    if material.candidate_device.type != "cpu":
        raise NoLine("the trace runs on the CPU only")
    if target.source is not None:
        raise NoLine("the trace sees no operations of C++")
    until = time.monotonic() + seconds
    try:
        source = candidate_source(target)
    except NoSource as error:
        raise NoLine(str(error)) from error
    try:
        golden = GoldenResults(material, first, ref.decisions, ref.seed)
        values = [[v.name, v.numbers, v.group] for v in golden_values(golden)]
    except Exception as error:
        raise NoLine(f"the golden cannot be traced ({type(error).__name__}: {error})") from error
    bounds = {}
    for name, kind, _ in first.results():
        against = None if name.removeprefix("saved.") in target.decisions else judged_reference(ref, name, kind, False)
        if against is not None:
            bounds[name] = (against.bounded.value.cpu(), against.allowed.cpu())
    message = {
        "files": list(source.modules.values()), "golden": values, "bounds": bounds,
        "wrong": sorted(n for n in examination.bad if n in bounds),
        "seconds": 0.6 * seconds,
        "run": request_of(material, RunSettings()), "sent": {n: t.cpu() for n, t in first.cotangents.items()},
    }  # fmt: skip
    try:
        answer = single_request(f"{__package__}.trace_process:serve", source, message, until)
    except NoAnswer as error:
        raise NoLine(f"the trace has no result: {error}") from error
    if not isinstance(answer, dict) or "line" not in answer:
        raise NoLine(str(answer.get("reason", "")) if isinstance(answer, dict) else "the process gave no answer")
    try:
        return FaultyLine.from_json(answer["line"])
    except (TypeError, KeyError, ValueError) as error:
        raise NoLine("the process sent a line that is none") from error
