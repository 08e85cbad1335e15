"""Calibration: what is measured, how long that takes, and where the result is cached."""

import inspect
import json
import math
import time
import warnings
from dataclasses import asdict

import pytest
import torch

from goldsmith.offload import Calibration, calibrate, plan
from goldsmith.offload.calibration import benches, call_overhead
from goldsmith.offload.engine import Engine
from goldsmith.offload.observe import processor_load
from goldsmith.offload.planning.assignment import Assignment, assign
from offload.stores import build, call
from offload.test_device import Simulation

pytestmark = pytest.mark.sweep(2)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(benches, "last_level_cache", lambda: 1 << 20)  # quick; on a real machine up to 384 MB are read
    monkeypatch.setattr(processor_load.ProcessorLoad, "__exit__", lambda self, *_: setattr(self, "share", 0.0))
    with build(tmp_path / "s.experts", E=5) as opened:
        yield opened


@pytest.fixture
def quick(monkeypatch):
    """The same measurements, too short to be accurate."""
    times, both = benches._times, benches.HostBench.together_with
    monkeypatch.setattr(benches, "_times", lambda run, seconds: times(run, seconds / 50))
    monkeypatch.setattr(benches.HostBench, "together_with", lambda self, copy, s, *n: both(self, copy, s / 50, *n))


def kept(tmp_path):
    return list((tmp_path / "cache" / "calibration").iterdir())


def test_it_takes_at_most_five_seconds_and_is_cached_afterwards(store, tmp_path):
    Engine(store, device="cpu").close()  # the first call of a process imports torch's compiler
    begin = time.perf_counter()
    first = calibrate(store, device="cpu")
    assert time.perf_counter() - begin < 5
    assert len(kept(tmp_path)) == 1
    begin = time.perf_counter()
    assert calibrate(store, device="cpu") == first
    assert time.perf_counter() - begin < 0.5


def test_its_costs_are_those_of_the_store_and_plan_takes_them(store, quick):
    calibration = calibrate(store, device="cpu")
    costs = calibration.costs
    assert costs.expert_bytes == store.blocks.stride
    assert costs.flops_per_token == 6 * store.hidden_size * store.intermediate_size
    rates = {name: value for name, value in asdict(costs).items() if isinstance(value, float)}
    assert "cpu_flops" in rates and all(map(math.isfinite, rates.values()))
    assert costs.dram_bytes_per_s >= max(costs.cpu_bytes_per_s, costs.link_bytes_per_s)
    assert (costs.device_bytes_per_s, costs.device_flops) == (costs.cpu_bytes_per_s, costs.cpu_flops)
    assert {"cpu_1", "cpu_4", "cpu_24", "cpu_240", "copy", "together", "cpu_latency"} <= set(calibration.measured)
    assert [n for n, _ in costs.cpu_curve] == list(benches.COUNTS) and costs.device_curve == costs.cpu_curve
    assert plan([1] * 5, (), costs).predicted > 0


def test_overheads_are_the_time_of_a_call_minus_its_lanes(store, monkeypatch):
    """On the lanes of a simulated GPU."""
    monkeypatch.setattr(call_overhead, "_CALLS", 1)
    monkeypatch.setattr(call_overhead, "_LEAST", 1)
    monkeypatch.setattr(call_overhead, "free_on_host", lambda: 1 << 26)
    begin = time.perf_counter()
    overhead = call_overhead.overheads(store, Simulation, torch.device("cpu"), 1, 0.0, 1e-3)
    spent = time.perf_counter() - begin
    assert set(overhead) == {"cpu", "link", "device", "split"}
    assert all(0 < seconds * call_overhead._CALLS * call_overhead._LEAST < spent for seconds in overhead.values())
    monkeypatch.setattr(call_overhead, "free_on_host", lambda: 1 << 12)
    assert call_overhead.overheads(store, Engine, torch.device("cpu"), 1, 0.0, 1e-3) == {}  # no room for slots


def test_the_overhead_of_a_route_is_the_slope_over_tokens_minus_the_kernel(store, monkeypatch):
    monkeypatch.setattr(call_overhead, "_PROMPTS", (70, 200))
    beside = {1: [4.0, 5.0, 6.0], 70: [3.0, 1.0, 2.0], 200: [9.0, 3.6]}
    monkeypatch.setattr(
        call_overhead, "_call_seconds", lambda engine, layer, turns, way, seconds, tokens=1: beside[tokens]
    )
    arguments = store, Engine, torch.device("cpu"), 1, 1.0, 1e-3
    assert "route" not in call_overhead.overheads(*arguments) and "route" not in call_overhead.overheads(
        *arguments, 1e-2
    )
    overhead = call_overhead.overheads(*arguments, 1e-6)
    assert overhead["route"] == pytest.approx((3.6 - 1.0) / 130) and overhead["cpu"] == 5.0


def test_a_layer_of_two_experts_measures_no_split(tmp_path):
    with build(tmp_path / "two.experts", E=2) as two:
        assert set(call_overhead.overheads(two, Engine, torch.device("cpu"), 1, 0.0, 1e-3)) == {"cpu", "link", "device"}


def test_where_the_device_is_the_cpu_nothing_is_copied_to_it(store, quick):
    """Whatever the measurements: the device would run the same kernel later, after a copy to a slot."""
    calibration = calibrate(store, device="cpu")
    costs = calibration.costs
    assert costs.shared and costs.split_latency == calibration.measured["call_split"] > 0
    assert costs.cpu_latency > calibration.measured["cpu_latency"] and costs.device_latency >= costs.cpu_latency
    x, ids, weights = call(store, 1, 30, 2)
    with Engine(store, device="cpu", gpu_budget="1MiB", calibration=calibration) as engine:
        for T in (1, 3, 30):
            engine(1, x[:T], ids[:T], weights[:T])
        engine._assign = lambda counts, *_: Assignment(cached=tuple(e for e, n in enumerate(counts) if n))
        engine(1, x, ids, weights)
        engine._assign = assign
        engine.reset_stats()
        for T in (1, 3, 30):
            engine(1, x[:T], ids[:T], weights[:T])
        stats = engine.stats()
        assert stats.experts_cpu and not (stats.experts_copied or stats.experts_cached or stats.uploads)
        assert "the CPU alone is quickest" in str(engine.explain())


def test_another_number_of_threads_or_another_store_is_measured_by_itself(store, tmp_path, quick):
    calibrate(store, device="cpu", threads=1)
    calibrate(store, device="cpu", threads=2)
    with build(tmp_path / "other.experts", E=5, format="int8") as other:
        calibrate(other, device="cpu", threads=1)
    assert len(kept(tmp_path)) == 3


@pytest.mark.parametrize("what", ["damaged", "of another machine", "of an older version", "rates of zero"])
def test_a_damaged_or_foreign_file_is_measured_again(store, tmp_path, what, quick):
    calibrate(store, device="cpu")
    (path,) = kept(tmp_path)
    content = json.loads(path.read_text())
    if what == "of another machine":
        content["key"]["cpu"] = "another"
    if what == "of an older version":
        content["key"]["version"] -= 1
        content["costs"] = {name: value for name, value in content["costs"].items() if "curve" not in name}
    if what == "rates of zero":
        content["costs"]["cpu_flops"] = 0
    path.write_text("{" if what == "damaged" else json.dumps(content))
    calibration = calibrate(store, device="cpu")
    assert calibration.key["cpu"] != "another" and calibration.costs.cpu_flops > 0 and calibration.costs.cpu_curve
    assert Calibration.load(path) == calibration


def test_force_measures_again(store, monkeypatch, quick):
    first = calibrate(store, device="cpu")
    assert calibrate(store, device="cpu", force=True).measured != first.measured


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine on which other programs take this share of the processors' time."""

    def of(share):
        monkeypatch.setattr(processor_load.ProcessorLoad, "__exit__", lambda self, *_: setattr(self, "share", share))

    return of


def test_a_calibration_of_a_busy_machine_warns_and_is_repeated_on_a_quiet_one(store, tmp_path, quick, machine):
    machine(0.4)
    with pytest.warns(RuntimeWarning, match="other programs took 40 % of the processors' time"):
        first = calibrate(store, device="cpu")
    assert first.busy and Calibration.load(kept(tmp_path)[0]) == first
    with pytest.warns(RuntimeWarning, match="force=True"):
        assert calibrate(store, device="cpu") == first  # still busy, so measuring again would not help
    with Engine(store, device="cpu", gpu_budget="1MiB", calibration=first) as engine:
        assert "measured on a busy machine: other programs took 40 %" in str(engine.explain())
    machine(0.01)
    with warnings.catch_warnings(action="error"):
        second = calibrate(store, device="cpu")
        assert calibrate(store, device="cpu") == second
    assert not second.busy and second.measured != first.measured
    with Engine(store, device="cpu", gpu_budget="1MiB", calibration=second) as engine:
        assert "busy machine" not in str(engine.explain())


def test_the_load_of_other_programs_is_neither_idle_time_nor_ours(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    stat, ours = tmp_path / "proc/stat", [10.0]
    monkeypatch.setattr(processor_load, "allowed", lambda: (1, 2))
    monkeypatch.setattr(processor_load.os, "times", lambda: (ours[0], 0.0, 0.0, 0.0, 0.0))
    tick = processor_load.os.sysconf("SC_CLK_TCK")

    def now(first, second, third):
        """user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice of three processors, in seconds"""
        rows = (f"cpu{i} " + " ".join(str(int(n * tick)) for n in row) for i, row in enumerate((first, second, third)))
        stat.write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *rows, "intr 5"]))

    idle = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    now(idle, idle, idle)
    with processor_load.ProcessorLoad(tmp_path) as seen:
        now((100, 0, 0, 0, 0, 0, 0, 0, 0, 0), (3, 1, 1, 3, 1, 0, 0, 1, 3, 1), (2, 0, 0, 8, 0, 0, 0, 0, 0, 0))
        ours[0] = 14.0
    assert seen.share == pytest.approx((6 + 2 - 4) / 20)  # only processors 1 and 2
    with processor_load.ProcessorLoad(tmp_path / "nowhere") as seen:
        pass
    assert seen.share is None


def test_a_saved_calibration_is_loaded_to_the_last_bit(store, tmp_path, quick):
    calibration = calibrate(store, device="cpu")
    calibration.save(tmp_path / "mine.json")
    assert Calibration.load(tmp_path / "mine.json") == calibration
    (tmp_path / "no.json").write_text('{"costs": {}}')
    with pytest.raises(ValueError, match=r"no\.json is not a calibration"):
        Calibration.load(tmp_path / "no.json")
    old = {**calibration.to_dict(), "key": {**calibration.key, "version": 5}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"old\.json is not a calibration \(it has version 5, "):
        Calibration.load(tmp_path / "old.json")
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"nowhere/mine\.json'$"):
        calibration.save(tmp_path / "nowhere" / "mine.json")


def test_without_a_writable_cache_it_measures_and_warns(store, quick, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"could not be saved \(Not a directory: .*every start measures again"):
        assert calibrate(store, device="cpu").costs.cpu_flops > 0
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    calibrate(store, device="cpu")
    (there,) = kept(tmp_path)
    there.unlink()
    there.mkdir()  # stands for a file of another user that may not be read
    with pytest.warns(RuntimeWarning, match=r"could not be saved \(Is a directory"):
        assert calibrate(store, device="cpu").costs.cpu_flops > 0


def test_a_device_that_is_no_gpu_is_refused(store):
    with pytest.raises(ValueError, match="device='meta', expected 'auto', 'cpu' or 'cuda:N'"):
        calibrate(store, device="meta")


def test_the_benches_read_more_blocks_than_the_cache_holds(store):
    blocks = benches.blocks_beyond_cache(store)
    assert blocks.numel() >= 2 * (1 << 20) and blocks.shape[1] == store.blocks.stride
    assert torch.equal(blocks[6], store.raw(store.layers[0], 6 % 4))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_its_measurements_take_at_most_five_seconds_in_total(store, device, monkeypatch):
    """Replaces the time limits by fixed ones: a clock would also measure other load and compilation."""
    arguments = []

    def noting(whole):
        def noted(*args, **named):
            bound = inspect.signature(whole).bind(*args, **named)
            arguments.append(bound.arguments["seconds"])
            bound.arguments["seconds"] /= 50
            return whole(*bound.args, **bound.kwargs)

        return noted

    for place, name in ((benches, "_times"), (benches.HostBench, "together_with"), (call_overhead, "_call_seconds")):
        monkeypatch.setattr(place, name, noting(getattr(place, name)))
    first = calibrate(store, device=device)
    assert len(arguments) > 5 and 0 < sum(arguments) <= 5
    again = calibrate(store, device=device, force=True)
    assert again.key == first.key and again.measured != first.measured
    for rate in ("cpu_bytes_per_s", "cpu_flops", "link_bytes_per_s", "device_bytes_per_s", "device_flops"):
        assert getattr(again.costs, rate) > 0, rate
