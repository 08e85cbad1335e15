"""Clocks: what a call costs on the device with a cold L2, what it costs in wall time, and how fast memory copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .subject import Call, Prepared

FLUSH_BYTES = 256 * 2**20
CYCLES_PER_US = 2_000  # a little above the highest SM clock: sleeping too long is harmless
MOST_LEAD_US = 60_000.0
LEAST_ROUNDS, MOST_ROUNDS = 10, 400
TURNS, SLOW_ROUNDS = 5, 3  # of each variant on a CPU; the least of one that takes longer than its budget for each
PAUSE_S = 0.1  # longer than any pool of workers waits without sleeping (kt-kernel: 50 ms)
TRIES = 3  # for a sample that the host was too late for; on a virtual machine it sometimes stops for a millisecond


@dataclass(frozen=True)
class Timing:
    """Microseconds: median and spread of one kind of call, and its median wall time."""

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
    """CUDA events around single calls, L2 flushed before each, variants taking turns.

    The stream sleeps before each call until the host has queued all of it, so that the events see the device's time
    alone; the wall time (queue empty, synchronised at both ends) is measured apart.
    """

    name = "cuda"

    def __init__(self, device: str) -> None:
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(self.device)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self.settled = False

    def compare(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
        """One timing for each call; they take turns, and the slowest decides how many rounds fit the budget."""
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

    def _once(self, call: Call, lead_us: float) -> tuple[Any, Any]:
        """The events around one call, again where the host queued it later than the stream slept."""
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
        """How long the host needs to queue the call, with a margin."""
        times = []
        for _ in range(3):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize(self.device)
        return min(1.5 * max(times) + 50, MOST_LEAD_US)

    def wall(self, call: Call, runs: int = 9) -> float:
        times = []
        for _ in range(runs):
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            call()
            torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times)

    def graph(self, call: Call, repeats: int = 20) -> Call:
        """`repeats` calls captured in one CUDA graph; its replay, to be divided by `repeats`."""
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
        """Bytes read and written per microsecond by a device copy of 1 GiB, after the clocks have settled."""
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
    """Wall time of single calls, variants taking turns of several calls; caches stay as the calls leave them.

    Workers that wait for their next task without sleeping would take a core from the next variant: a turn begins with a
    pause, and with a call that is not timed.
    """

    name = "cpu"

    def compare(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
        samples: dict[str, list[float]] = {name: [] for name in calls}
        turn_us = budget_s / TURNS * 1e6
        for _ in range(TURNS):
            for name, call in calls.items():
                taken = samples[name]
                if len(taken) >= SLOW_ROUNDS and sum(taken) > SLOW_ROUNDS * TURNS * turn_us:
                    continue
                if len(calls) > 1:
                    time.sleep(PAUSE_S)
                if not taken or taken[-1] < turn_us:
                    call()
                until = time.perf_counter() + turn_us / 1e6
                for _ in range(MOST_ROUNDS // TURNS):
                    taken.append(self._once(call))
                    if time.perf_counter() >= until:
                        break
        timings = {name: Timing.of(times) for name, times in samples.items()}
        return {name: Timing(t.median, t.p10, t.p90, t.runs, t.median) for name, t in timings.items()}

    def _once(self, call: Call) -> float:
        if isinstance(call, Prepared):
            call.before()
            call = call.call
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6

    def copy_rate(self) -> float:
        source = torch.ones(2**27, dtype=torch.int8)
        target = torch.ones_like(source)
        samples = []
        for _ in range(9):
            began = time.perf_counter()
            target.copy_(source)
            samples.append((time.perf_counter() - began) * 1e6)
        return 2 * source.numel() / statistics.median(samples)


def clock(device: str) -> CudaClock | CpuClock:
    return CudaClock(device) if device.startswith("cuda") else CpuClock()
