"""Wall time of single calls on one machine; different ways take turns, and each call is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from goldsmith.cli.bench.timing import Timing

TURNS, LEAST, MOST = 4, 3, 400  # turns of each way; fewest timings of a slow one, most of a quick one
PAUSE = 0.03  # seconds before a turn, so that the threads of the last way go to sleep
LONG = 1.0  # seconds; a longer call gets no untimed warm-up call in each turn


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Timing]:
    """Timings of each call, `seconds` long; a turn begins with an untimed call, unless the call is long.

    around(name) is entered around the timed calls of a turn and is not timed itself.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            times = samples[name]
            if len(times) >= LEAST and sum(times) > 1e6 * seconds:
                continue
            time.sleep(PAUSE)
            if not times or times[-1] < 1e6 * max(LONG, seconds / TURNS):
                call()
            with around(name):
                times += _samples(call, seconds / TURNS)
    return {name: Timing.of(times) for name, times in samples.items()}


def _samples(call: Callable[[], object], seconds: float) -> list[float]:
    """Microseconds of calls until `seconds` have passed, at least one."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < MOST // TURNS:
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
        if time.perf_counter() >= until:
            break
    return times
