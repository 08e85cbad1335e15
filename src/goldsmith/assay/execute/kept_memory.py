"""Memory that outlives a run: inputs for the next run, and results that a later call may overwrite.

The newest few of either are kept, so that a check that ends early leaks nothing.
"""

from __future__ import annotations

from torch import Tensor

from .memory import Arena
from .records import SAME_ID, CandidateRun, Material, RunSettings

_MOST = 4
_TRIES = 16  # tensors to allocate until one has the wanted id
_ARENAS: dict[str, Arena] = {}
_RUNS: dict[str, CandidateRun] = {}


def arena(material: Material, settings: RunSettings) -> Arena | None:
    """The memory for a run: new, or that of an earlier run with other numbers in it; None where that cannot be."""
    kept = settings.kept_inputs
    if kept is not None and kept.key in _ARENAS:
        there = _ARENAS[kept.key]
        write = _of_the_same_id if kept.how == SAME_ID else _written_over
        return there if all(write(there, n, material.inputs[n]) for n in kept.names) else None
    new = Arena(settings.fill, settings.neighbour_sign, watched=settings.watch_seconds > 0)
    if kept is not None:
        _add(_ARENAS, kept.key, new)
    return new


def keep(key: str, run: CandidateRun) -> None:
    _add(_RUNS, key, run)


def results(key: str) -> dict[str, Tensor]:
    """The results of a kept run as its memory holds them now, without those that its own backward overwrote."""
    run = _RUNS.get(key)
    if run is None:
        return {}
    return {n: t.clone() for n, t in {**run.live_outputs, **run.live_grads}.items() if n not in run.overwritten}


def _add(store: dict, key: str, value: object) -> None:
    store.pop(key, None)
    store[key] = value
    for old in list(store)[:-_MOST]:
        del store[old]


def _written_over(there: Arena, name: str, other: Tensor) -> bool:
    """Writes other numbers into the same tensor."""
    buffer = there.inputs[name]
    buffer.tensor.copy_(other)
    buffer.before = buffer.raw.clone()
    return True


def _of_the_same_id(there: Arena, name: str, other: Tensor) -> bool:
    """Places another tensor that reuses a freed one's id. False if the old one still lives, or its id is not reused."""
    before = there.inputs[name]
    now = there.place(name, other)
    wanted, views = id(before.tensor), []
    before.tensor = before.tensor.detach()  # keeps the guard bands; the tensor that the candidate received is freed
    for _ in range(_TRIES):
        views.append(now.detach())
        if id(views[-1]) == wanted:
            there.inputs[name].tensor = views[-1]
            return True
    return False
