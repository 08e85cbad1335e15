"""Results that outlive a run, and that a later call may overwrite; only the newest few, so that nothing leaks."""

from __future__ import annotations

from torch import Tensor

from .records import CandidateRun

_MOST = 4
_RUNS: dict[str, CandidateRun] = {}


def keep(key: str, run: CandidateRun) -> None:
    _RUNS.pop(key, None)
    _RUNS[key] = run
    for old in list(_RUNS)[:-_MOST]:
        del _RUNS[old]


def results(key: str) -> dict[str, Tensor]:
    """The results of a kept run as its memory holds them now, without those that its own backward overwrote."""
    run = _RUNS.get(key)
    if run is None:
        return {}
    return {n: t.clone() for n, t in {**run.live_outputs, **run.live_grads}.items() if n not in run.overwritten}
