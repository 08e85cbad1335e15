"""Times of accepted candidates: verified, and checked by the judge's clock."""

import os
from types import SimpleNamespace

import pytest
import torch

from goldsmith import assay
from goldsmith.assay import gate
from goldsmith.assay.gate.judging import GateOptions
from goldsmith.assay.gate.timing import floors, measure


def golden(x, w):
    return x * w


@assay.case(T=[2, 64])
def rows(make, T):
    return {"x": make.normal(T, 512), "w": make.normal(512)}


PROBLEM = gate.Problem(golden, rows, name="scale", backward=None)
RIGHT = "def candidate(x, w):\n    return x * w\n"
SLOW = """
import time
known = {}

def candidate(x, w):
    key = x.numpy(force=True).tobytes(), w.numpy(force=True).tobytes()
    if key not in known:
        time.sleep(0.003)
        known[key] = x * w
    return known[key].clone()
"""
AHEAD = """
import sys, threading, time

ready, known = {}, {}

def work(x, w):
    for _ in range(10):
        x.sin()
    return x * w

def look():
    main = threading.main_thread().ident
    while True:
        frame = sys._current_frames().get(main)
        while frame is not None and not frame.f_code.co_filename.endswith("timed_calls.py"):
            frame = frame.f_back
        supply = frame.f_locals.get("supply") if frame is not None else None
        if supply and id(supply["x"]) not in ready:
            x, w = supply["x"], supply["w"]
            ready.clear()
            ready[id(x)] = x, w, work(x, w)
        del frame, supply
        time.sleep(0.001)

threading.Thread(target=look, daemon=True).start()

def candidate(x, w):
    hit = ready.get(id(x))
    if hit is not None and hit[0] is x and hit[1] is w:
        return hit[2]
    key = x.numpy(force=True).tobytes(), w.numpy(force=True).tobytes()
    if key not in known:
        known[key] = work(x, w)
    return known[key].clone()
"""
COUNTING = """
calls = 0

def candidate(x, w):
    global calls
    calls += 1
    return x * w if calls < 12 else x.clone()
"""


def timed(source, **more):
    options = GateOptions(probes="quick", seed=1, time=True, **more)
    return next(iter(gate.judge_all([gate.Candidate("own", source)], PROBLEM, options=options)))


def test_an_accepted_candidate_has_its_time_beside_the_reference():
    verdict = timed(RIGHT)
    assert verdict.ok and verdict.timing["case"] == "rows[T=64]"
    assert verdict.timing["floor"] < verdict.timing["time"] < 20_000 and verdict.timing["reference"] > 0
    assert gate.Verdict.from_json(verdict.to_json()).timing == verdict.timing


@pytest.mark.sweep(2, part=0)
def test_a_slow_candidate_is_slow_although_it_remembers_the_result_of_every_input():
    verdict = timed(SLOW)
    assert verdict.ok and 3_000 < verdict.timing["time"] < 100_000 and verdict.timing["speedup"] < 1


@pytest.mark.sweep(2, part=1)
def test_a_thread_that_computes_ahead_while_the_caches_are_flushed_gains_nothing():
    """Unflushed calls, which would show it, cannot be answered from memory: each has numbers of its own."""
    verdict = timed(AHEAD)
    doubt = verdict.timing["doubts"][-1]  # the chain's, or already that of the processor time of its thread
    assert verdict.ok and ("calls in a chain take" in doubt or "the judge's clock says" in doubt)
    assert 2 * verdict.timing["wall"] < verdict.timing["time"]


FORGED = """
import sys, time

def candidate(x, w):
    modules = getattr(sys, "mod" + "ules")
    modules["goldsmith.assay.gate.timing.timed_calls"]._now = lambda: time.perf_counter_ns() // 40
    return x * w
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("source, said", [(COUNTING, "call"), (FORGED, "timed_calls._now")])
def test_a_candidate_that_is_right_only_in_its_first_calls_or_forges_the_clock_is_found_in_timed_calls(source, said):
    verdict = timed(source)
    assert verdict.status == "cheating" and said in " ".join(verdict.evidence)


BUSY = """
def candidate(x, w):
    for _ in range(120):
        x.sin()
    return x * w
"""


def test_the_judges_clock_sees_the_work_of_the_candidates_process():
    verdict = timed(BUSY)
    assert verdict.ok and verdict.timing["judge"] > 1_000 and not verdict.timing["doubts"]


def test_a_clock_that_stands_still_is_not_believed():
    timing = measure._believed(rows[0], [[0.0, 0.0]] * 12, [[0, "wall"]] * 12, 3_500.0)
    assert timing.p10 is timing.p90 is None  # the process's own clock has no say
    assert timing.time == 3_500.0 and "the judge's clock says 3500 us" in timing.doubts[0]


def test_a_clock_that_makes_small_calls_smaller_is_not_believed():
    timing = measure._believed(rows[0], [[3.0, 0.0]] * 12, [[0, "wall", 1]] * 12, 130.0)
    measure._hold_against(timing, 130.0, loop=50.0)
    assert timing.p10 is timing.p90 is None
    assert timing.time == 130.0 and "calls in a chain take 130 us" in timing.doubts[0]


def test_a_device_that_is_slow_for_one_of_several_requests_raises_no_doubt(monkeypatch):
    clock = iter([0.0, 0.35, 1.0, 1.01, 2.0, 2.01])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measure, "timed_calls", lambda process, materials, part, further: [(72.0, 0.0)] * len(part))
    process = SimpleNamespace(pid=os.getpid())
    times, judge = measure._clocked_calls(process, [], [[0, "wall", 1]] * 96, torch.device("cuda"))
    assert len(times) == 96 and judge == pytest.approx(312.5)


def test_work_on_another_stream_makes_the_wall_time_count():
    schedule = [[0, "wall"], [0, "device"]] * 6
    timing = measure._believed(rows[0], [[900.0, 0.0], [10.0, 850.0]] * 6, schedule, 950.0)
    assert timing.time == 900.0 and timing.device == 10.0 and "other streams" in timing.doubts[0]


def test_a_time_below_the_floor_is_impossible():
    x = torch.randn(256, 1024)
    by_memory, limit = floors.least_us({"x": x}, lambda: x * 2, torch.device("cpu"))
    assert by_memory > 0 and limit == "1,048,576 bytes to read"
    wide = torch.randn(256, 256)
    by_products, limit = floors.least_us({"a": wide}, lambda: torch.linalg.matrix_power(wide, 64), torch.device("cpu"))
    assert "FLOP in float32" in limit and by_products > 0


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_times_are_those_of_events():
    verdict = timed(RIGHT, device="cuda")
    assert verdict.ok and verdict.timing["device"] is not None and not verdict.timing["doubts"]
