"""Calls that return before the CPU lane has finished: nothing is lost, and times are those of the work."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from goldsmith.core import native
from goldsmith.offload.calibration import call_overhead
from goldsmith.offload.lanes import cpu_lane
from goldsmith.offload.testing import inject
from offload import stores
from offload.test_device import Simulation, engine_of
from repo.tree import ROOT

pytestmark = pytest.mark.skipif(native.reason() is not None, reason=f"native library: {native.reason()}")
FULL = "the native library could not get the memory that this call needs"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 2), format="fp32")


def failing(lanes, patch):
    """Makes the CPU lane fail after its work is done."""
    end = lanes.cpu.lane.end

    def failed():
        end()
        raise MemoryError(FULL)

    patch.setattr(lanes.cpu.lane, "end", failed)


class Watched:
    """Counts waits for the CPU lane, and streams that were made to wait for it."""

    def __init__(self, monkeypatch, lanes, most=0):
        self.ends, self.follows, cpu = 0, 0, lanes.cpu
        end, follow = cpu.end, cpu.make_stream_wait

        def ended():
            self.ends += 1
            return end()

        def followed(stream):
            assert self.ends <= most
            self.follows += 1
            follow(stream)

        monkeypatch.setattr(cpu, "end", ended)
        monkeypatch.setattr(cpu, "make_stream_wait", followed)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_call_does_not_wait_for_the_cpu_and_is_counted_in_the_next(store, monkeypatch, tokens):
    x, ids, weights = stores.call(store, 0, tokens, 3, dtype=torch.float32)
    with engine_of(store) as engine:
        assert engine.runs_ahead
        seen = Watched(monkeypatch, engine._lanes)
        first = engine(0, x, ids, weights)
        tally = engine._tallies[0]
        assert (seen.follows, seen.ends, tally.t_cpu) == (1, 0, 0.0)
        stats = engine.stats()
        assert seen.ends == 1 and 0 < stats.t_cpu <= stats.t_wall and engine._lanes._open is None
        monkeypatch.undo()
        engine.reset_stats()
        again = [engine(0, x, ids, weights) for _ in range(3)]
        assert all(torch.equal(each, first) for each in again)
        stats = engine.stats()
        assert stats.calls == 3 and stats.experts_cpu and stats.t_cpu <= stats.t_wall


def test_the_time_of_a_call_lasts_until_the_cpu_has_finished(store, monkeypatch):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    with engine_of(store, "cpu") as engine:
        engine(0, x, ids, weights)
        end = engine._lanes.cpu.lane.end
        monkeypatch.setattr(engine._lanes.cpu.lane, "end", lambda: (end()[0], time.perf_counter() + 5))
        stats = engine.stats()
        assert 5 < stats.t_cpu < stats.t_wall


def test_each_piece_of_a_call_is_counted(store, monkeypatch):
    x, ids, weights = stores.call(store, 0, 7, 2, dtype=torch.float32)
    with engine_of(store, "cpu") as engine:
        monkeypatch.setattr(engine._lanes, "most_rows", 4)
        seen = Watched(monkeypatch, engine._lanes, most=3)
        engine(0, x, ids, weights)
        assert (seen.follows, seen.ends) == (4, 3)
        experts = sum(len(set(ids[at : at + 2].view(-1).tolist())) for at in range(0, 7, 2))
        assert engine.stats().bytes_store_read == experts * store.expert_nbytes(0)


def test_an_error_of_the_cpu_lane_is_raised_by_the_next_call_with_the_right_call_named(store, monkeypatch):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    with engine_of(store) as engine:
        clean = engine(0, x, ids, weights)
        for tell in (lambda: engine(0, x, ids, weights), engine.flush, engine.stats, engine.end_forward):
            engine(2, x, ids, weights)
            engine._lanes._pending[1].rows.fill_(torch.nan)  # like rows that were never written
            engine._lanes._dirty[0] = 1
            with monkeypatch.context() as patch:
                failing(engine._lanes, patch)
                with pytest.raises(MemoryError, match=f"the call before failed .1 tokens in layer 2.: {FULL}"):
                    tell()
            assert torch.equal(engine(0, x, ids, weights), clean)  # and not: a race, check the memory
            engine.flush()


@pytest.mark.parametrize("by", ["close", "block"])
def test_an_error_of_the_last_call_is_raised_at_the_end(store, monkeypatch, by):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    with pytest.raises(MemoryError, match=FULL), monkeypatch.context() as patch:
        with engine_of(store) as engine:
            engine(0, x, ids, weights)
            failing(engine._lanes, patch)
            if by == "close":
                engine.close()
    assert engine.closed and not hasattr(engine, "_lanes")
    engine.close()


def test_the_blocks_own_exception_wins_over_an_error_at_its_end(store, monkeypatch):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    with pytest.raises(ZeroDivisionError), monkeypatch.context() as patch:
        with engine_of(store) as engine:
            engine(0, x, ids, weights)
            failing(engine._lanes, patch)
            raise ZeroDivisionError
    assert engine.closed


@pytest.mark.parametrize("inside", [True, False])
def test_an_engine_that_is_closed_in_a_trace_is_closed_and_traced(store, tmp_path, inside):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    engine = engine_of(store)
    if not inside:
        engine(0, x, ids, weights)  # and is not in the trace
    with engine.trace(tmp_path / "t.json"):
        if inside:
            engine(0, x, ids, weights)
        engine.close()
    spans = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert bool(spans) is inside and all(e["ts"] >= 0 for e in spans)


def test_a_trace_in_one_thread_does_not_disturb_calls_of_another(store, monkeypatch, tmp_path):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    with engine_of(store, "cpu") as engine:
        wanted, cpu, items = engine(0, x, ids, weights), engine._lanes.cpu.lane, []
        end = cpu.end
        monkeypatch.setattr(cpu, "end", lambda: (time.sleep(0.02), end())[1])

        def calls():
            for _ in range(12):
                try:
                    items.append(torch.equal(engine(0, x, ids, weights), wanted))
                except (ValueError, RuntimeError) as error:
                    items.append(error)

        thread = threading.Thread(target=calls)
        thread.start()
        while thread.is_alive():
            with engine.trace(tmp_path / "t.json"):
                time.sleep(0.005)
        assert items == [True] * 12


def test_faults_are_planted_after_the_cpu_has_written(store):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    with engine_of(store, "cpu", guard="off") as engine:
        with inject(engine, "transfer", layer=0, expert=int(ids[0, 0])):
            assert torch.isnan(engine(0, x, ids, weights)).all() and engine._lanes._open is None


def test_the_time_of_calls_is_counted_once(store, monkeypatch):
    """Each call's time begins when the one before was finished, and lasts until the CPU is; pieces make no
    difference.
    """
    x, ids, weights = stores.call(store, 0, 60, 2, dtype=torch.float32)
    with engine_of(store, "cpu") as engine:
        engine(0, x, ids, weights)
        cpu = engine._lanes.cpu.lane
        end = cpu.end

        def late():
            begin, _ = end()
            time.sleep(0.02)
            return begin, time.perf_counter()

        monkeypatch.setattr(cpu, "end", late)
        for rows in (1000, 16):
            engine._lanes.most_rows = rows
            engine.reset_stats()
            began = time.perf_counter()
            for _ in range(3):
                engine(0, x, ids, weights)
            engine.flush()
            real, stats = time.perf_counter() - began, engine.stats()
            assert 0.9 * real < stats.t_wall <= real and stats.overlap <= 1


def test_an_adaptive_engine_waits_for_its_times(store):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    options = {"lanes": "auto", "calibration": stores.calibration(store), "adaptive": True}
    with Simulation(store, device="cpu", gpu_budget="24MiB", **options) as engine:
        engine(0, x, ids, weights)
        assert not engine.runs_ahead and engine._lanes._open is None


def test_the_split_cost_is_the_callers_own_work_if_calls_run_ahead(store, monkeypatch):
    flushed, calls = [], call_overhead._split_call_seconds

    def own(engine, *arguments):
        flush = engine.flush
        monkeypatch.setattr(engine, "flush", lambda: flushed.append(engine._lanes._open is not None) or flush())
        return calls(engine, *arguments)

    monkeypatch.setattr(call_overhead, "_split_call_seconds", own)
    overhead = call_overhead.overheads(store, Simulation, torch.device("cpu"), 1, 0.01, 1e-3)
    assert overhead["split"] > 0 and len(flushed) >= call_overhead._CALLS and sum(flushed) >= call_overhead._CALLS - 1


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_program_that_exits_during_a_call_keeps_its_exit_status(end):
    program = f"""
        import torch
        from goldsmith import experts
        from goldsmith.offload.lanes.cpu_lane import CpuLane
        base = experts.pack(torch.randn(4, 512, 512), torch.randn(4, 512, 256), format="fp32")
        lane = CpuLane({{"activation": "silu", "alpha": 1.702, "limit": None}}, 1)
        T = 4000
        lane.begin(torch.randn(T, 512), torch.arange(4).expand(T, 4).contiguous(), base,
                   torch.empty(4 * T, 512), torch.empty(4 * T, dtype=torch.uint8))
        {end}
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert run.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[end], run.stderr


@pytest.mark.parametrize("name", ["gs_lane_begin", "gs_lane_end"])
@pytest.mark.parametrize("after", [True, False])
def test_an_interrupt_around_a_library_call_leaves_a_working_engine(store, monkeypatch, name, after):
    x, ids, weights = stores.call(store, 0, 1, 3, dtype=torch.float32)
    with engine_of(store, "cpu") as engine:
        wanted, library = engine(0, x, ids, weights), native.library()

        def interrupted(*arguments):
            if after:
                getattr(library, name)(*arguments)
            raise KeyboardInterrupt

        calls = ("gs_lane_begin", "gs_lane_end", "gs_lane_ready")
        some = SimpleNamespace(**{each: getattr(library, each) for each in calls} | {name: interrupted})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cpu_lane, "native", SimpleNamespace(library=lambda: some, check=native.check))
            engine(0, x, ids, weights)
        for _ in range(3):
            assert torch.equal(engine(0, x, ids, weights), wanted)


def test_an_interrupt_anywhere_leaves_a_working_engine(store):
    x, ids, weights = stores.call(store, 0, 3, 3, dtype=torch.float32)
    with engine_of(store, "cpu") as engine:
        wanted, interrupted = engine(0, x, ids, weights), 0
        for turn in range(30):
            timer = threading.Timer(0.0003 * turn, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                for _ in range(200):
                    engine(0, x, ids, weights)
                timer.join()  # must arrive here at the latest, not in pytest's code
                time.sleep(1)
            except KeyboardInterrupt:
                interrupted += 1
            assert torch.equal(engine(0, x, ids, weights), wanted)
        assert interrupted
