"""From calibration to plan: on a simulated machine with known times, the calibrated plan finds the best cut."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from goldsmith.offload import plan
from goldsmith.offload.calibration import benches, calibration
from goldsmith.offload.engine import Engine
from goldsmith.offload.planning.plan import on_cpu
from offload.stores import build

LATENCY = {"cpu": 143e-6, "link": 157e-6, "device": 155e-6, "split": 300e-6}


class Machine:
    """About an H100 with 15 threads: an expert of n tokens takes t(n) seconds, and t(n) + extra while copies run."""

    copy, slow_copy, device = 186e-6, 200e-6, 4e-6

    def __init__(self, each, extra):
        self.each, self.extra = each, extra

    def t(self, n):
        """80 us for the weights, plus time for the tokens, half of it in steps of 16 rows."""
        return 80e-6 + self.each * (n if n <= 4 else (n + 16 * -(-n // 16)) / 2)

    def g(self, n):
        return self.device + 1e-8 * n

    def truth(self, counts, copied):
        """Simulated seconds of a call, expert by expert: the CPU's run while copies last, then without them."""
        cpu = [n for e, n in enumerate(counts) if n and e not in copied]
        copies, worked, left = 0.0, 0.0, float(len(copied))
        for n in cpu:
            slow, alone = self.t(n) + self.extra, self.t(n)
            beside = min(slow, left * self.slow_copy)
            left -= beside / self.slow_copy
            worked += beside + alone * (1 - beside / slow)
        copies = worked + left * self.copy if left else len(copied) * self.slow_copy
        lanes = [worked + LATENCY["cpu"] if cpu else 0.0]
        if copied:
            lanes.append(copies + LATENCY["link"] + self.g(1))
        return max(lanes)

    def best(self, counts):
        falling = sorted(range(len(counts)), key=lambda e: -counts[e])
        return min(self.truth(counts, set(falling[:i])) for i in range(len(counts) + 1))


class Device:
    """What DeviceBench measures on this machine."""

    together, transport = 8, SimpleNamespace(why="told")

    def __init__(self, machine):
        self.machine = machine

    def copy(self, seconds):
        return self.machine.copy

    pageable = copy

    def link_latency(self, seconds):
        return 20e-6

    def memory(self, seconds):
        return 3e12

    def kernel(self, tokens, seconds, *, experts=None):
        return 100e-6 + (experts or self.together) * self.machine.g(tokens)

    def copier(self):
        return lambda: 1

    def free_arena(self):
        pass

    close = free_arena


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """Costs of this machine, as `calibrate` derives them."""

    def of(machine, route=0.0):
        def call(self, tokens, experts):
            return lambda: 7e-6 + experts * machine.t(tokens)

        def beside(self, copy, seconds, tokens=1, each=0.0):
            return machine.t(tokens) + machine.extra, machine.slow_copy

        monkeypatch.setattr(benches, "_times", lambda run, seconds: [run()])
        monkeypatch.setattr(benches.HostBench, "call", call)
        monkeypatch.setattr(benches.HostBench, "together_with", beside)
        monkeypatch.setattr(calibration, "DeviceBench", lambda *_: Device(machine))
        # the overhead of a call with one expert, measured apart from the lane's own work
        spent = LATENCY | {"cpu": LATENCY["cpu"] - 7e-6, "link": LATENCY["link"] + machine.device, "route": route}
        monkeypatch.setattr(calibration, "overheads", lambda *_: spent)
        with build(tmp_path / f"{route}.experts", E=5) as store:
            return calibration._measured(store, torch.device("cuda"), 15, {}, Engine).costs

    return of


def routed(tokens, k=8, experts=128):
    """Random tokens of each expert, from a router without favourites."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    return torch.bincount(scores.topk(k).indices.view(-1), minlength=experts).tolist()


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("each, extra", [(2e-6, 60e-6), (6e-6, 0.0), (5e-7, 80e-6)])
def test_the_plan_is_the_best_cut_and_its_prediction_holds(calibrated, each, extra, tokens):
    machine, counts = Machine(each, extra), routed(tokens)
    costs = calibrated(machine)
    result = plan(counts, (), costs)
    measured = machine.truth(counts, set(result.copied))
    assert result.predicted == pytest.approx(measured, rel=0.1)
    assert measured <= 1.05 * machine.best(counts)
    alone = on_cpu(counts, costs)
    assert alone.predicted == pytest.approx(machine.truth(counts, set()), rel=0.1)


def test_rates_alone_predict_times_that_no_lane_reaches(calibrated):
    """32 tokens per expert: too few for the rate of operations at 64, and too many for the rate of bytes."""
    machine, counts = Machine(6e-6, 60e-6), routed(512)
    costs = calibrated(machine)
    rates = replace(
        costs, cpu_curve=(), cpu_beside_curve=(), device_curve=(), link_beside_bytes_per_s=None,
        cpu_flops=costs.flops_per_token * 64 / machine.t(64),
    )  # fmt: skip
    before, now = plan(counts, (), rates), plan(counts, (), costs)
    was, measured = (machine.truth(counts, set(entry.copied)) for entry in (before, now))
    assert before.predicted < 0.8 * was  # 80 % of the predicted speed could not be reached
    assert measured < 0.9 * was and len(now.cpu) < len(before.cpu)


def test_the_overhead_of_a_route_is_added_to_the_cpus_curve(calibrated):
    machine = Machine(2e-6, 60e-6)
    without, costs = calibrated(machine), calibrated(machine, 1e-6)
    for curve in ("cpu_curve", "cpu_beside_curve"):
        for (n, before), (m, seconds) in zip(getattr(without, curve), getattr(costs, curve), strict=True):
            assert n == m and seconds == pytest.approx(before + n * 1e-6)
    assert costs.device_curve == without.device_curve


@pytest.mark.parametrize("times, wanted", [
    ({1: 2.0, 4: 3.0, 16: 3.0}, [2.0, 3.0, 3.0]),
    ({1: 2.0, 4: 4.0, 16: 3.0, 32: 5.0}, [2.0, 3.5, 3.5, 5.0]),
    ({1: 3.0, 4: 2.0, 16: 1.0, 32: 5.0}, [2.0, 2.0, 2.0, 5.0]),
    ({4: 1.0, 1: 3.0, 16: 4.0, 32: 2.0}, [2.0, 2.0, 3.0, 3.0]),
])  # fmt: skip
def test_decreasing_times_become_their_mean(times, wanted):
    assert calibration._rising(times) == tuple((float(n), t) for n, t in zip(sorted(times), wanted, strict=True))


# -- measurements of a real kernel


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(benches, "last_level_cache", lambda: 1 << 20)
    with build(tmp_path / "s.experts", E=5) as opened:
        yield opened


@pytest.mark.parametrize("lane", [False, True])
def test_more_tokens_take_longer_in_the_lanes_own_thread_too(store, lane):
    threads = threading.active_count()
    host = benches.HostBench(store, 1, lane=lane)
    result = host.curve(0.02)
    assert list(result) == list(benches.COUNTS) and min(result.values()) > 0
    assert result[240] > result[1]
    x, seen = torch.randn(3, store.hidden_size).bfloat16(), []
    host._kernels.rows = lambda x, ids, *_: seen.append((x.shape[0], tuple(ids.shape)))
    if lane:  # each route by itself, sorted by expert, as in the engine
        host._lane.begin = lambda x, ids, *_: seen.append((x.shape[0], tuple(ids.shape), ids[:4, 0].tolist()))
        host._lane.end = lambda: (1.0, 3.5)
        assert host.call(4, 2)() == 2.5 and seen[-1][:2] == (8, (8, 1)) and len(set(seen[-1][2])) == 1
        del host._lane.begin, host._lane.end
    else:
        assert host.call(4, 2)() is None and seen == [(4, (4, 2))]
    del x
    host.close()
    assert threading.active_count() == threads


def test_counts_that_take_too_long_are_left_out(store, monkeypatch):
    host = benches.HostBench(store, 1)
    monkeypatch.setattr(benches.HostBench, "call", lambda self, tokens, experts: lambda: experts * tokens * 0.01)
    monkeypatch.setattr(benches, "_times", lambda run, seconds: [run()])
    assert host.curve(0.2) == pytest.approx({1: 0.01, 4: 0.04, 12: 0.12})


def test_parallel_copies_run_in_another_thread_and_are_counted(store):
    host, threads = benches.HostBench(store, 1), set()

    def copies():
        threads.add(threading.get_ident())
        time.sleep(0.002)
        return 4

    each, copy = host.together_with(copies, 0.05)
    assert threads and threading.get_ident() not in threads
    assert 0 < each < 0.05 and 0.002 / 4 <= copy * 1.5 and copy <= 0.05
    assert host.together_with(lambda: time.sleep(0.002), 0.05)[1] >= 0.002 / 1.5  # one at a time
