"""The clocks of `goldsmith bench`, and what the machine's ceilings make of their times."""

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from goldsmith.cli.bench import ceilings, timing
from goldsmith.cli.bench import run as bench_run
from goldsmith.cli.bench.ceilings import Ceiling
from goldsmith.cli.bench.rows import Conditions, timed
from goldsmith.cli.bench.run import Bench, BenchRequest
from goldsmith.cli.bench.subject import OURS, Prepared, Subject, Variant
from goldsmith.cli.bench.timing import CpuClock, CudaClock, Timing
from goldsmith.core.device import BackendUnavailable
from goldsmith.core.op import Op


def test_floor_and_share_come_from_the_copy_rate_of_the_run():
    copy = Ceiling("copy", 50.0)
    figures = timed(Timing(40.0, 36.0, 44.0, 5, 60.0), 1000, copy, divide=2)
    assert figures["floor_us"] == 20.0 and figures["median_us"] == 20.0 and figures["share_of_ceiling"] == 1.0
    assert (figures["p10"], figures["p90"], figures["wall_us"]) == (18.0, 22.0, 30.0)
    assert timed(Timing(40.0, 36.0, 44.0, 5), None, copy)["share_of_ceiling"] is None


def test_the_floor_is_the_longer_of_bytes_and_products():
    ceiling = Ceiling("read", 50.0, "fma", 10.0)
    assert ceiling.floor(1000, 100) == (20.0, "read") and ceiling.floor(1000, 300) == (30.0, "fma")
    figures = timed(Timing(40.0, 36.0, 44.0, 5), 1000, ceiling, flop=300)
    assert (figures["ceiling"], figures["flop"], figures["share_of_ceiling"]) == ("fma", 300, 0.75)


def test_medians_and_spreads_are_those_of_the_samples():
    made = Timing.of([float(k) for k in range(11, 0, -1)], wall=3.0)
    assert (made.median, made.p10, made.p90, made.runs, made.wall) == (6.0, 2.0, 10.0, 11, 3.0)


def test_variants_take_turns_on_the_cpu_each_after_a_pause_and_a_call_that_is_not_timed(monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "PAUSE_S", 0.0)
    timings = CpuClock().compare({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 0.01)
    turns = "".join(seen).replace("ab", "a b").replace("ba", "b a").split()
    assert [set(turn) for turn in turns] == [{"a"}, {"b"}] * timing.TURNS
    assert timings["a"].runs == seen.count("a") - timing.TURNS and timings["b"].median > 0


def test_a_slow_variant_has_few_turns(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(timing, "PAUSE_S", 0.0)
    assert CpuClock().compare({"slow": lambda: None}, 0.01)["slow"].runs == timing.SLOW_ROUNDS


def test_the_call_before_a_prepared_call_is_not_timed(monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def takes(seconds, name):
        def call():
            now[0] += seconds
            seen.append(name)

        return call

    call = Prepared(takes(5.0, "before"), takes(0.25, "call"))
    assert CpuClock()._once(call) == 0.25e6 and seen == ["before", "call"]
    call()
    assert seen == ["before", "call"] * 2


def test_a_missing_instruction_sets_no_ceiling_and_each_rate_is_measured_once_per_thread_count(monkeypatch):
    requests = []

    def measure(what, *, threads, seconds, megabytes):
        requests.append((what, threads))
        if what == "amx_bf16":
            raise BackendUnavailable("level avx2 has no such instruction")
        return {"read": 2e9, "fma": 5e9, "dot_bf16": 4e9}[what]

    monkeypatch.setattr(ceilings.native, "measure", measure)
    monkeypatch.setattr(ceilings.native, "reason", lambda: None)
    subject = SimpleNamespace(entry=SimpleNamespace(forward_flop=1, products=(), dtype=torch.bfloat16))
    result = ceilings.Ceilings(CpuClock())
    assert result.of(subject, 3) == result.of(subject, 3) == Ceiling("read", 2000.0, "fma", 5000.0)
    assert (
        sorted(set(requests)) == [(what, 3) for what in ("amx_bf16", "dot_bf16", "fma", "read")] and len(requests) == 8
    )


# the clock of a GPU, on a device of straw: what it queues, and in which order


class Straw:
    """Stands in for torch.cuda: events read a clock that sleeping and calling move on."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def event(self, enable_timing):
        straw = self

        class Event:
            def record(self):
                straw.log.append("event")
                self.at = straw.now

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        return Event()

    def sleep(self, cycles):
        self.log.append("sleep")
        self.now += cycles / timing.CYCLES_PER_US


@pytest.fixture
def straw(monkeypatch):
    made = Straw()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return made


def test_a_gpu_timing_sees_the_call_alone_after_the_queue_is_filled_and_the_cache_flushed(straw):
    clock = object.__new__(CudaClock)
    clock.device = torch.device("cpu")
    clock.flush = SimpleNamespace(zero_=lambda: straw.log.append("flush"))

    def call(name, cost):
        def made():
            straw.log.append(name)
            straw.now += cost

        return made

    timings = clock.compare({"a": call("a", 10.0), "b": call("b", 30.0)}, 0.0)
    assert timings["a"].median == pytest.approx(10.0) and timings["b"].median == pytest.approx(30.0)
    assert timings["a"].runs == timing.LEAST_ROUNDS
    turn = ["sleep", "flush", "event", "a", "event", "sleep", "flush", "event", "b", "event"]
    assert straw.log[-10:] == turn


def test_a_sample_whose_call_was_queued_late_is_repeated(straw, monkeypatch):
    clock = object.__new__(CudaClock)
    clock.device, clock.flush = torch.device("cpu"), SimpleNamespace(zero_=lambda: None)
    host = iter([0.0, 1.0, 1.0, 1.00001])  # a second too late, then 10 us after the stream fell asleep
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(host))
    clock._once(lambda: straw.log.append("call"), 50.0)
    assert straw.log.count("call") == 2
    monkeypatch.setattr(timing.time, "perf_counter", iter(range(100)).__next__)
    clock._once(lambda: straw.log.append("always late"), 50.0)
    assert straw.log.count("always late") == timing.TRIES


class Card(CudaClock):
    """A GPU's clock without one: a graph is its calls, and each timing 100 us."""

    def __init__(self):
        self.device = torch.device("cpu")

    def compare(self, calls, budget_s):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, Timing(100.0, 90.0, 120.0, 7, 130.0))

    def graph(self, call, repeats=20):
        return lambda: [call() for _ in range(repeats)]

    def copy_rate(self):
        return 1000.0


def test_replayed_calls_find_none_of_their_inputs_in_the_cache(monkeypatch):
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    op = Op.get("router.product_topk")
    case = next(case for case in op.bench if case.replayed)
    assert case.forward_bytes == 4096 * (2 * 256 * 2 + 8 * 32)
    monkeypatch.setattr(bench_run, "FLUSH_BYTES", 2 * case.forward_bytes)
    seen = []

    def ours(self, backend):
        place = self.tensors["x"].data_ptr()
        forward = lambda: seen.append((place, torch.is_grad_enabled())) or self.tensors["x"]  # noqa: E731
        return Variant(OURS, forward, [], comparable=False)

    monkeypatch.setattr(Subject, "ours", ours)
    monkeypatch.setattr(Variant, "backward", lambda self: lambda: None)
    verifier = SimpleNamespace(verdict=lambda subject, backend: (None, ""))
    conditions = Conditions("cuda", "machine", {}, "abc1234", "2026-01-01")
    bench = Bench(BenchRequest(backend="reference"), conditions, Card(), {}, verifier, Console(quiet=True))
    rows = list(bench.run([lambda: Subject(op, case, "cpu")]))
    assert [(row.direction, row.mode) for row in rows] == [
        ("forward", "cold"), ("backward", "cold"), ("forward", "replayed"),
    ]  # fmt: skip
    assert rows[-1].median_us == 100.0 / bench_run.GRAPH_CALLS
    assert [grad for _, grad in seen] == [True] * (len(seen) - bench_run.GRAPH_CALLS) + [False] * bench_run.GRAPH_CALLS
    turns = [place for place, _ in seen[-bench_run.GRAPH_CALLS :]]
    assert len(set(turns[:3])) == 3 and turns == (turns[:3] * 7)[: bench_run.GRAPH_CALLS]
