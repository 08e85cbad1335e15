"""measure: the time of a candidate's calls that its judge believes, and what the judge holds against it.

The candidate's process reports times. The judge compares them with a clock of its own: on a CPU the processor time of
that process, which a busy machine does not change, and on a GPU the time of the whole request. It judges results of the
timed calls like any others, and no time may be below what the device can do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...declare.case import Case
from ...declare.target import Target
from ...execute.records import CandidateRun, Material
from ...judge.examination import Examination
from ...probes import select, values
from ...report.results import QUALITY
from ..isolation.candidate_process import CandidateProcess
from ..isolation.limits import processor_seconds
from ..isolation.wire import outputs_from_data, timed_request_of, times_from_data
from . import floors
from .timed_calls import DEVICE, WALL, TimedCalls, varied

SETS = 6  # different inputs, in random order
LEAST, MOST = 12, 96  # calls
BUDGET_US = 400_000.0
VERIFIED_BYTES, VERIFY_LEAST, VERIFY_SECONDS = 32 << 20, 6, 1.0  # results that are judged
MANY, MANY_US, MANY_SLOWER_US = 2000, 100_000.0, 100.0  # calls without a flush, and how far the judge's clock may be
TAIL_US = 100.0  # of work that goes on after the stream of the call has finished
SLOWER, SLOWER_US = 4.0, 1_000.0  # how far the judge's clock must be above the reported time to doubt it


@dataclass
class CallTiming:
    """Microseconds of one call, median of `calls`.

    time      what is believed: device time where the device's and the host's clocks agree, else the slower one
    device    between events; None on a CPU
    wall      from an idle device to an idle device
    judge     by the judge's clock, without what the harness costs; on a CPU processor time
    reference the golden as plain torch in the case's dtype, timed in the same way by the judge
    floor     less is impossible, because of `limit`
    doubts    sentences: work on other streams, clocks that disagree
    """

    case: str
    time: float
    wall: float
    judge: float
    device: float | None = None
    reference: float | None = None
    floor: float = 0.0
    limit: str = ""
    p10: float = 0.0
    p90: float = 0.0
    calls: int = 0
    doubts: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        return None if self.reference is None or not self.time else self.reference / self.time

    def to_json(self) -> dict[str, object]:
        rounded = {n: round(v, 3) if isinstance(v, float) else v for n, v in asdict(self).items()}
        return {**rounded, "speedup": None if self.speedup is None else round(self.speedup, 3)}


class Impossible(Exception):
    """A time below the floor, or a wrong result in a timed call: `reason` is the trick, the text the evidence."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def measure(process: CandidateProcess, target: Target, device: torch.device, seed: int) -> CallTiming:
    """The timing of the largest case; raises `Impossible` where the candidate's results or times cannot be true."""
    order = random.Random(seed)
    case = max(target.cases, key=lambda c: _elements(c, target.dtypes[0]))
    examination = Examination(target, case, target.dtypes[0], device, seed, select("quick"), case.name)
    values.run(examination)
    wrong = [f for f in examination.findings if f.rung != QUALITY]
    if wrong:
        raise Impossible("call_count", f"right when it was judged, and wrong in another process: {wrong[0].text}")
    materials = [replace(examination.variant(100 + k), seed=seed) for k in range(SETS)]
    first = timed_calls(process, materials, _salted([[k % SETS, WALL] for k in range(4)], examination, order))
    typical = statistics.median(wall for wall, _ in first[1:])
    calls = int(min(MOST, max(LEAST, BUDGET_US / max(typical, 1.0))))
    schedule = _salted(_schedule(calls, device, order), examination, order)
    before, began = processor_seconds(process.pid), time.perf_counter()
    times = timed_calls(process, materials, schedule)
    elapsed, spent = time.perf_counter() - began, processor_seconds(process.pid) - before
    clock = (elapsed if device.type == "cuda" else spent) * 1e6 / calls
    _verify(process, examination, materials, schedule, order)
    timing = _believed(case, times, schedule, max(0.0, clock - _harness(materials, schedule, device)))
    _hold_against(timing, _many(process, materials, timing, device))
    timing.reference = _reference(materials, device)
    bound = materials[0].target.bound("golden", materials[0].supply)
    timing.floor, timing.limit = floors.least_us(materials[0].inputs, lambda: bound(materials[0].supply), device)
    if timing.time < timing.floor:
        raise Impossible(
            "impossible_time",
            f"a call of {timing.time:.3g} us is impossible: {timing.limit} take at least {timing.floor:.3g} us here",
        )
    return timing


def _many(process: CandidateProcess, materials: Sequence[Material], timing: CallTiming, device: torch.device) -> float:
    """Microseconds of one call by the judge's clock, which times many together.

    The caches are not flushed between them, because a flush takes longer than a small call. Of processor time and wall
    time the smaller counts: one adds up all threads, the other has what else the machine does.
    """
    size = sum(t.numel() * t.element_size() for t in materials[0].inputs.values())
    calls = int(min(MANY, max(LEAST, MANY_US / max(timing.wall, 1.0)), max(LEAST, VERIFIED_BYTES // max(size, 1))))
    schedule = [[k % SETS, WALL, 0] for k in range(calls)]
    before, began = processor_seconds(process.pid), time.perf_counter()
    timed_calls(process, materials, schedule, flush=False)
    elapsed, spent = time.perf_counter() - began, processor_seconds(process.pid) - before
    clock = (elapsed if device.type == "cuda" else min(elapsed, spent)) * 1e6 / calls
    return max(0.0, clock - _harness(materials, schedule, device, flush=False))


def _hold_against(timing: CallTiming, judge: float) -> None:
    """Believes the judge's clock where many calls took far longer than the process says of one."""
    if judge > SLOWER * timing.wall + MANY_SLOWER_US and judge > timing.time:
        timing.doubts.append(f"many calls take {judge:.0f} us each, and the process says {timing.wall:.0f} us of one")
        timing.time = judge


def timed_calls(
    process: CandidateProcess, materials: Sequence[Material], schedule: Sequence[object], *, flush: bool = True
) -> list[tuple[float, float]]:
    """(microseconds, microseconds of work left) of timed calls, as the candidate's process reports them."""
    request = {"do": "time", "flush": flush, **timed_request_of(materials, schedule)}
    return process.answer(
        request, f"{len(schedule)} timed calls", lambda reply: times_from_data(reply.get("times"), len(schedule)),
        calls=len(schedule),
    )  # fmt: skip


def timed_results(process: CandidateProcess, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """What the last timed calls of these numbers returned."""
    request = {"do": "timed_results", "numbers": list(numbers)}
    return process.answer(
        request, "a request for results", lambda reply: outputs_from_data(reply.get("outputs"), len(numbers))
    )


def _schedule(calls: int, device: torch.device, order: random.Random) -> list[list[object]]:
    kinds = (WALL, DEVICE) if device.type == "cuda" else (WALL,)
    return [[order.randrange(SETS), kinds[k % len(kinds)]] for k in range(calls)]


def _salted(schedule: Sequence[Sequence[object]], examination: Examination, order: random.Random) -> list[list[object]]:
    """The calls with a salt each, so that no numbers repeat; 0 where a condition of the case could exclude them."""
    fixed = examination.case.where is not None
    return [[*entry, 0 if fixed else order.randrange(1, 2**31)] for entry in schedule]


def _elements(case: Case, dtype: torch.dtype) -> int:
    return sum(t.numel() for t in case.build(dtype).values() if isinstance(t, Tensor))


def _believed(
    case: Case, times: Sequence[Sequence[float]], schedule: Sequence[Sequence[object]], judge: float
) -> CallTiming:
    walls = [t[0] for t, (_, kind, *_) in zip(times, schedule, strict=True) if kind == WALL]
    events = [t for t, (_, kind, *_) in zip(times, schedule, strict=True) if kind == DEVICE]
    wall, doubts = statistics.median(walls), []
    device = statistics.median(t[0] for t in events) if events else None
    believed, samples = (wall, walls) if device is None else (device, [t[0] for t in events])
    tail = statistics.median(t[1] for t in events) if events else 0.0
    if device is not None and tail > TAIL_US + 0.05 * device:
        doubts.append(f"work went on for {tail:.0f} us on other streams: the wall time counts")
        believed, samples = wall, walls
    if judge > SLOWER * wall + SLOWER_US:
        doubts.append(f"the judge's clock says {judge:.0f} us a call, and the candidate's process {wall:.0f} us")
        believed = judge
    ordered = sorted(samples)
    p10, p90 = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return CallTiming(case.name, believed, wall, judge, device, p10=p10, p90=p90, calls=len(times), doubts=doubts)


def _harness(
    materials: Sequence[Material], schedule: Sequence[Sequence[object]], device: torch.device, *, flush: bool = True
) -> float:
    """Microseconds of one turn of the loop around a call that does nothing, by the same clock."""
    calls = TimedCalls()
    first = next((t[:0] if t.dim() else t for t in materials[0].inputs.values()), torch.zeros(0))
    plain = [replace(m, target=replace(m.target, outputs=None)) for m in materials]
    calls.run(lambda supply: first, plain, schedule[:2])
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began = clock()
    calls.run(lambda supply: first, plain, schedule, flush=flush)
    return (clock() - began) * 1e6 / len(schedule)


def _reference(materials: Sequence[Material], device: torch.device) -> float | None:
    """The golden's time in the case's dtype; None where it does not run there."""
    golden = materials[0].target.golden
    plain = getattr(golden, "plain", golden)
    targets = [replace(m, target=replace(m.target, golden=plain)) for m in materials]
    bound = targets[0].target.bound("golden", targets[0].supply)
    kind = DEVICE if device.type == "cuda" else WALL
    try:
        times = TimedCalls().run(bound, targets, [[k % SETS, kind, k + 1] for k in range(LEAST)])
    except (RuntimeError, TypeError, ValueError):
        return None
    return statistics.median(t[0] for t in times[2:])


def _verify(
    process: CandidateProcess, examination: Examination, materials: Sequence[Material],
    schedule: Sequence[Sequence[Any]], order: random.Random,
) -> None:  # fmt: skip
    """Judges results of timed calls, which the judge chooses only now."""
    numbers = order.sample(range(len(schedule)), len(schedule))
    first = timed_results(process, numbers[:1])[0]
    size = sum(t.numel() * t.element_size() for t in first.values())
    numbers = numbers[: max(2, min(len(numbers), VERIFIED_BYTES // max(size, 1)))]
    until, seen = time.monotonic() + VERIFY_SECONDS, dict[tuple[int, int], Mapping[str, Tensor]]()
    for number, outputs in zip(numbers, timed_results(process, numbers), strict=True):
        which, _, salt = schedule[number]
        if (which, salt) in seen and _equal(seen[which, salt], outputs):
            continue
        if len(seen) >= VERIFY_LEAST and time.monotonic() > until:
            break
        seen[which, salt] = outputs
        run = CandidateRun(names=tuple(outputs), outputs=dict(outputs))
        given = materials[which]
        inputs = varied(given.inputs, salt)
        material = replace(given, inputs=inputs, target=replace(given.target, backward=None))
        reference = examination.references(material, run)
        bad = values.judge(examination, run, reference, "values", f"timed call {number + 1}", noise=False, repeat=None)
        if bad:
            text = examination.findings[-1].text if examination.findings else f"{', '.join(sorted(bad))} is wrong"
            raise Impossible(
                "call_count", f"timed call {number + 1} is wrong, and such inputs were right before: {text}"
            )


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())
