"""measure: the time of a candidate's calls that its judge believes, and what the judge holds against it.

The candidate's process reports times. The judge compares them with a clock of its own: on a CPU the processor time of
that process, which a busy machine does not change, and on a GPU the time of whole requests. It judges results of the
timed calls like any others, and no time may be below what the device can do.

A chain of calls, which the judge alone times, shows work that the process did before its clock started: nobody knows
the inputs of a call in a chain before the call before it has ended.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from ...declare.case import Case
from ...declare.problem_steps import step
from ...declare.target import Target
from ...execute.records import Material
from ...judge.examination import Examination
from ...probes import select, values
from ...report.results import QUALITY
from ..isolation.candidate_process import CandidateProcess
from ..isolation.limits import processor_seconds
from . import floors
from .impossibility import Impossible
from .requests import chained_calls, timed_calls
from .timed_calls import DEVICE, WALL, TimedCalls
from .verification import VERIFIED_BYTES, verify_calls, verify_chain

SETS = 6  # different inputs, in random order
LEAST, MOST = 12, 96  # calls
BUDGET_US = 400_000.0
REQUESTS = 3  # among which the calls are divided: another process's work on the device slows one of them, not all
CHAIN, CHAIN_US = 1000, 60_000.0  # calls without a flush
TAIL_US = 100.0  # of work that goes on after the stream of the call has finished
SLOWER, SLOWER_US = 4.0, 1_000.0  # how far the judge's clock must be above the reported time to doubt it
CHAIN_SLOWER, CHAIN_SLOWER_US, CHAIN_HARNESS = 1.5, 30.0, 0.25  # the same for a chain; a share of what its loop costs


@dataclass
class CallTiming:
    """Microseconds of one call, median of `calls`.

    time      what is believed: device time where the device's and the host's clocks agree, else the slower one
    device    between events; None on a CPU
    wall      from an idle device to an idle device
    judge     by the judge's clock, without what the harness costs; on a CPU processor time
    reference the golden as plain torch in the case's dtype, timed in the same way by the judge
    floor     less is impossible, because of `limit`
    p10, p90  of the reported times; None where the judge's clock counts instead, which says only one time
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
    p10: float | None = None
    p90: float | None = None
    calls: int = 0
    doubts: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        return None if self.reference is None or not self.time else self.reference / self.time

    def to_json(self) -> dict[str, object]:
        rounded = {n: round(v, 3) if isinstance(v, float) else v for n, v in asdict(self).items()}
        return {**rounded, "speedup": None if self.speedup is None else round(self.speedup, 3)}


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
    calls = _affordable(typical)
    schedule = _salted(_schedule(calls, device, order), examination, order)
    times, clock = _clocked_calls(process, materials, schedule, device)
    result = verify_calls(process, examination, materials, schedule, order)
    timing = _believed(case, times, schedule, max(0.0, clock - _harness(materials, schedule, device)))
    _hold_against(timing, *_chained(process, examination, materials, timing, result, order))
    timing.reference = _reference(materials, device)
    bound = materials[0].target.bound("golden", materials[0].supply)
    timing.floor, timing.limit = floors.least_us(materials[0].inputs, lambda: bound(materials[0].supply), device)
    if timing.time < timing.floor:
        raise Impossible(
            "impossible_time",
            f"a call of {timing.time:.3g} us is impossible: {timing.limit} take at least {timing.floor:.3g} us here",
        )
    return timing


def _clocked_calls(
    process: CandidateProcess, materials: Sequence[Material], schedule: Sequence[Sequence[object]], device: torch.device
) -> tuple[list[tuple[float, float]], float]:
    """(the reported times of the calls, microseconds of a call by the judge's clock: the median of the requests)."""
    times, clocks = list[tuple[float, float]](), list[float]()
    ends = [len(schedule) * k // REQUESTS for k in range(REQUESTS + 1)]
    for part in (schedule[begin:end] for begin, end in pairwise(ends)):
        before, began = processor_seconds(process.pid), time.perf_counter()
        times += timed_calls(process, materials, part, further=bool(times))
        elapsed, spent = time.perf_counter() - began, processor_seconds(process.pid) - before
        clocks.append((elapsed if device.type == "cuda" else spent) * 1e6 / len(part))
    return times, statistics.median(clocks)


def _chained(
    process: CandidateProcess, examination: Examination, materials: Sequence[Material], timing: CallTiming,
    result: Mapping[str, Tensor], order: random.Random,
) -> tuple[float, float]:  # fmt: skip
    """(microseconds of one call of a chain by the judge's clock, of one turn of its loop without a call).

    Of processor time and wall time the smaller counts: one adds up all threads, the other has what else the machine
    does. Where the call seems slower than reported, it is timed again, and the smallest time counts.
    """
    device = materials[0].device
    size = sum(t.numel() * t.element_size() for t in materials[0].inputs.values())
    calls = int(min(CHAIN, max(LEAST, CHAIN_US / max(timing.wall, 1.0)), max(LEAST, VERIFIED_BYTES // max(size, 1))))
    least, loop = math.inf, 0.0
    for _ in range(REQUESTS):
        salt = _salt(examination, order)
        before, began = processor_seconds(process.pid), time.perf_counter()
        chained_calls(process, materials, calls, salt)
        elapsed, spent = time.perf_counter() - began, processor_seconds(process.pid) - before
        clock = (elapsed if device.type == "cuda" else min(elapsed, spent)) * 1e6 / calls
        verify_chain(process, examination, materials, calls, salt, order)
        harness = _loop(materials, calls, salt, result, device)
        if max(0.0, clock - harness) < least:
            least, loop = max(0.0, clock - harness), harness
        if not _contradicts(timing, least, loop):
            break
    return least, loop


def _contradicts(timing: CallTiming, judge: float, loop: float) -> bool:
    return judge > CHAIN_SLOWER * timing.wall + CHAIN_SLOWER_US + CHAIN_HARNESS * loop


def _hold_against(timing: CallTiming, judge: float, loop: float) -> None:
    """Believes the judge's clock where the calls of a chain took far longer than the process says of one.

    loop: microseconds of the harness in one turn of the chain.
    """
    if _contradicts(timing, judge, loop) and judge > timing.time:
        timing.doubts.append(
            f"calls in a chain take {judge:.0f} us each, and the process says {timing.wall:.0f} us of one"
        )
        timing.time, timing.p10, timing.p90 = judge, None, None


def _schedule(calls: int, device: torch.device, order: random.Random) -> list[list[object]]:
    kinds = (WALL, DEVICE) if device.type == "cuda" else (WALL,)
    return [[order.randrange(SETS), kinds[k % len(kinds)]] for k in range(calls)]


def _salted(schedule: Sequence[Sequence[object]], examination: Examination, order: random.Random) -> list[list[object]]:
    """The calls with a salt each, so that no numbers repeat."""
    return [[*entry, _salt(examination, order)] for entry in schedule]


def _salt(examination: Examination, order: random.Random) -> int:
    """0 where a condition of the case could exclude other numbers."""
    return 0 if examination.case.where is not None else order.randrange(1, 2**31)


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
        believed, samples = judge, []
    ordered = sorted(samples)
    p10, p90 = (ordered[round(q * (len(ordered) - 1))] if ordered else None for q in (0.1, 0.9))
    return CallTiming(case.name, believed, wall, judge, device, p10=p10, p90=p90, calls=len(times), doubts=doubts)


def _harness(
    materials: Sequence[Material], schedule: Sequence[Sequence[object]], device: torch.device
) -> float:  # fmt: skip
    """Microseconds of one turn of the loop around a call that does nothing, by the same clock."""
    calls = TimedCalls()
    first = next((t[:0] if t.dim() else t for t in materials[0].inputs.values()), torch.zeros(0))
    calls.run(lambda supply: first, _nameless(materials), schedule[:2])
    return _clocked(device, len(schedule), lambda: calls.run(lambda supply: first, _nameless(materials), schedule))


def _loop(
    materials: Sequence[Material], calls: int, salt: int, result: Mapping[str, Tensor], device: torch.device
) -> float:  # fmt: skip
    """Microseconds of one turn of a chain whose calls do nothing, and return results of the candidate's size."""
    ready = tuple(t.to(device) for t in result.values())
    return _clocked(device, calls, lambda: TimedCalls().chain(lambda supply: ready, _nameless(materials), calls, salt))


def _nameless(materials: Sequence[Material]) -> list[Material]:
    return [replace(m, target=replace(m.target, outputs=None)) for m in materials]


def _clocked(device: torch.device, calls: int, run: Callable[[], object]) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began = clock()
    run()
    return (clock() - began) * 1e6 / calls


def _reference(materials: Sequence[Material], device: torch.device) -> float | None:
    """The golden's time in the case's dtype; None where it does not run there."""
    golden = materials[0].target.golden
    plain = getattr(golden, "plain", golden)
    targets = [replace(m, target=replace(m.target, golden=plain)) for m in materials]
    bound = targets[0].target.bound("golden", targets[0].supply)
    kind = DEVICE if device.type == "cuda" else WALL
    try:
        with step("the timed calls of its golden"):  # one for all of them, because each would be told within its time
            first = TimedCalls().run(bound, targets, [[k % SETS, WALL, k + 1] for k in range(4)])
            calls = _affordable(statistics.median(t[0] for t in first[1:]))
            times = TimedCalls().run(bound, targets, [[k % SETS, kind, k + 5] for k in range(calls)])
    except (RuntimeError, TypeError, ValueError):
        return None
    return statistics.median(t[0] for t in times)


def _affordable(typical: float) -> int:
    """How many calls of so many microseconds are timed."""
    return int(min(MOST, max(LEAST, BUDGET_US / max(typical, 1.0))))
