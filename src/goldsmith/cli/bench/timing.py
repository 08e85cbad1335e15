"""Clocks for a GPU (device time with a cold L2, and wall time) and for a CPU, and the rate of copying memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .subject import Call, Prepared

FLUSH_BYTES = 256 * 2**20
CYCLES_PER_US = 2_000  # a little above the highest SM clock: a sleep that is too long does no harm
MOST_LEAD_US = 60_000.0
LEAST_ROUNDS, MOST_ROUNDS = 10, 400
TURNS, SLOW_ROUNDS = 5, 3  # turns of a variant on a CPU; the fewest calls of one that exceeds its budget
PAUSE_S = 0.1  # longer than idle workers of any pool spin (kt-kernel: 50 ms)
TRIES = 3  # for a sample whose call was queued too late: a virtual machine sometimes stops for a millisecond


@dataclass(frozen=True)
class Timing:
    """Median, spread and median wall time of one call, in microseconds."""

    median: float
    p10: float
    p90: float
    runs: int
    wall: float | None = None

    @classmethod
    def of(cls, samples: list[float], wall: float | None = None) -> Timing:
        ordered = sorted(samples)
        p10, p90 = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
        return cls(statistics.median(ordered), p10, p90, len(ordered), wall)


class CudaClock:
    """CUDA events around single calls; L2 is flushed before each call, and variants take turns.

    The stream sleeps until the host has queued the whole call, so that the events measure device time alone. Wall time
    is measured separately, from an empty queue to a synchronised device.
    """

    name = "cuda"

    def __init__(self, device: str) -> None:
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(self.device)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self.settled = False

    def compare(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
        """A timing per call. They take turns; the number of rounds is what the budget allows."""
        if not calls:
            return {}
        walls = {name: self.wall(call) for name, call in calls.items()}
        leads = {name: self._lead(call) for name, call in calls.items()}
        slowest = sum(walls.values()) + sum(leads.values())
        rounds = int(min(MOST_ROUNDS, max(LEAST_ROUNDS, budget_s * 1e6 * len(calls) / max(slowest, 1.0))))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            pairs = [(name, *self._once(call, leads[name])) for name, call in calls.items()]
            torch.cuda.synchronize(self.device)
            for name, start, end in pairs:
                samples[name].append(start.elapsed_time(end) * 1e3)
        return {name: Timing.of(samples[name], walls[name]) for name in calls}

    def _once(self, call: Call, lead_us: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """The events around one call; repeated where the stream woke before the host had queued the call."""
        for _ in range(TRIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(lead_us * CYCLES_PER_US))
            asleep = time.perf_counter()
            self.flush.zero_()
            start.record()
            call()
            end.record()
            if (time.perf_counter() - asleep) * 1e6 < lead_us:
                break
        return start, end

    def _lead(self, call: Call) -> float:
        """Microseconds that the host needs to queue the call, with a margin."""
        times = []
        for _ in range(3):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize(self.device)
        return min(1.5 * max(times) + 50, MOST_LEAD_US)

    def wall(self, call: Call, runs: int = 9) -> float:
        """Median wall time of a synchronised call in microseconds."""
        times = []
        for _ in range(runs):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            call()
            torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times)

    def graph(self, call: Call, repeats: int = 20) -> Call:
        """The replay of a CUDA graph of `repeats` calls: divide its time by `repeats`."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        return graph.replay

    def copy_rate(self) -> float:
        """Bytes read and written per microsecond by a device copy of 1 GiB, once the clocks have settled."""
        source = torch.randint(-128, 128, (2**30,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        until = time.perf_counter() + (0.1 if self.settled else 0.5)
        self.settled = True
        while time.perf_counter() < until:
            for _ in range(20):
                target.copy_(source)
            torch.cuda.synchronize(self.device)
        samples = []
        for _ in range(20):
            start, end = self._once(lambda: target.copy_(source), 50.0)
            torch.cuda.synchronize(self.device)
            samples.append(start.elapsed_time(end) * 1e3)
        return 2 * source.numel() / statistics.median(samples)


class CpuClock:
    """Wall time of single calls, with warm caches; variants take turns of several calls.

    A turn begins with a pause and an untimed call, because idle workers of the last variant may still spin on a core.
    """

    name = "cpu"

    def compare(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
        samples: dict[str, list[float]] = {name: [] for name in calls}
        turn_us = budget_s / TURNS * 1e6
        for _ in range(TURNS):
            for name, call in calls.items():
                times = samples[name]
                if len(times) >= SLOW_ROUNDS and sum(times) > SLOW_ROUNDS * TURNS * turn_us:
                    continue
                if len(calls) > 1:
                    time.sleep(PAUSE_S)
                if not times or times[-1] < turn_us:
                    call()
                until = time.perf_counter() + turn_us / 1e6
                for _ in range(MOST_ROUNDS // TURNS):
                    times.append(self._once(call))
                    if time.perf_counter() >= until:
                        break
        timings = {name: Timing.of(values) for name, values in samples.items()}
        return {name: Timing(t.median, t.p10, t.p90, t.runs, t.median) for name, t in timings.items()}

    def _once(self, call: Call) -> float:
        if isinstance(call, Prepared):
            call.before()
            call = call.call
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6

    def copy_rate(self) -> float:
        """Bytes read and written per microsecond by a copy of 128 MiB."""
        source = torch.ones(2**27, dtype=torch.int8)
        target = torch.ones_like(source)
        samples = []
        for _ in range(9):
            began = time.perf_counter()
            target.copy_(source)
            samples.append((time.perf_counter() - began) * 1e6)
        return 2 * source.numel() / statistics.median(samples)


def clock(device: str) -> CudaClock | CpuClock:
    """The clock for this device."""
    return CudaClock(device) if device.startswith("cuda") else CpuClock()
