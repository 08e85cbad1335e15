"""Requests for timed calls to a candidate's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...execute.records import Material
from ..isolation.candidate_process import CandidateProcess
from ..isolation.wire import calls_request_of, outputs_from_data, times_from_data


def timed_calls(
    process: CandidateProcess, materials: Sequence[Material], schedule: Sequence[Sequence[object]], *,
    further: bool = False,
) -> list[tuple[float, float]]:  # fmt: skip
    """(microseconds, microseconds of work left) of the calls of a schedule, as the candidate's process reports them.

    further: the results of earlier ones stay there.
    """
    arguments = {"schedule": [list(entry) for entry in schedule], "further": further}
    return _timed(process, materials, len(schedule), len(schedule), arguments)


def chained_calls(process: CandidateProcess, materials: Sequence[Material], calls: int, salt: int) -> None:
    """Calls of which each but the first gets numbers that depend on the results of the call before."""
    _timed(process, materials, calls, 0, {"calls": calls, "salt": salt})


def _timed(
    process: CandidateProcess, materials: Sequence[Material], calls: int, times: int, arguments: Mapping[str, Any]
) -> list[tuple[float, float]]:
    request = {"do": "time", **calls_request_of(materials), "arguments": dict(arguments)}
    return process.answer(
        request, f"{calls} timed calls", lambda reply: times_from_data(reply.get("times"), times), calls=calls
    )


def timed_results(process: CandidateProcess, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """What timed calls of these numbers returned, since the last ones that were not `further`."""
    request = {"do": "timed_results", "numbers": list(numbers)}
    return process.answer(
        request, "a request for results", lambda reply: outputs_from_data(reply.get("outputs"), len(numbers))
    )
