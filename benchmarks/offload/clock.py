"""Ways that take turns on one machine: wall time of single calls, each waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from goldsmith.cli.bench.timing import Timing

TURNS, LEAST, MOST = 4, 3, 400  # turns of each way; timings of one that is slow, and of one that is quick
PAUSE = 0.03  # seconds before a turn, in which the threads of the last way go to sleep
LONG = 1.0  # seconds of a call that is not made untimed once more in each turn


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Timing]:
    """Timings of each call, in as many seconds for each; a turn begins with a call that is not timed, unless it is long

    around(name) is entered around the timed calls of a turn, and not timed itself.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            taken = samples[name]
            if len(taken) >= LEAST and sum(taken) > 1e6 * seconds:
                continue
            time.sleep(PAUSE)
            if not taken or taken[-1] < 1e6 * max(LONG, seconds / TURNS):
                call()
            with around(name):
                taken += _samples(call, seconds / TURNS)
    return {name: Timing.of(taken) for name, taken in samples.items()}


def _samples(call: Callable[[], object], seconds: float) -> list[float]:
    """Microseconds of calls, one at least, until so many seconds are over."""
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < MOST // TURNS:
        began = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - began))
        if time.perf_counter() >= until:
            break
    return taken
