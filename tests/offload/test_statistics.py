"""The engine's reports: counts, times, the explanation, the trace."""

import json
import re

import pytest
import torch

from goldsmith.offload.engine import Engine
from goldsmith.offload.explanation import _size
from goldsmith.offload.observe.statistics import Counts
from offload import stores

NAMES = """calls tokens prefill_calls hits misses hit_rate uploads evictions experts_cpu experts_copied experts_cached
bytes_h2d bytes_d2h bytes_store_read t_cpu t_link t_device t_merge t_wait t_wall bound bound_share overlap limiting"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 3))


def engine_of(store, **options):
    settings = {"device": "cpu", "gpu_budget": "1MiB", "calibration": stores.calibration(store)}
    return Engine(store, **settings | options)


def test_rates_without_counts_are_none_not_zero(store):
    with engine_of(store) as engine:
        result = engine.stats().to_dict()
    assert set(NAMES.split()) | {"layers"} == set(result)
    assert [result[name] for name in ("hit_rate", "bound_share", "overlap", "limiting")] == [None] * 4
    assert result["calls"] == result["bytes_h2d"] == 0 and result["layers"] == {}


def test_experts_bytes_and_tokens_are_counted_by_lane_and_layer(store):
    x, ids, weights = stores.call(store, 0, 1, 6)  # each expert once: two per lane
    block = store.expert_nbytes(0)
    with engine_of(store, lanes="mixed") as engine:
        engine(0, x, ids, weights)
        engine(3, *stores.call(store, 3, 20, 6))
        stats = engine.stats()
    of = stats.layers[0]
    assert (of.experts_cpu, of.experts_copied, of.experts_cached) == (2, 2, 2)
    assert (of.calls, of.tokens, of.prefill_calls, stats.layers[3].prefill_calls) == (1, 1, 0, 1)
    assert (of.bytes_h2d, of.bytes_store_read, of.uploads) == (4 * block, 6 * block, 2)
    assert of.hits == of.experts_cached and of.hits + of.misses == 6
    assert (stats.calls, stats.tokens, stats.bytes_h2d) == (2, 21, 8 * block)
    assert all(getattr(stats, name) > 0 for name in ("t_cpu", "t_link", "t_device", "t_merge", "t_wall"))
    assert max(of.t_cpu, of.t_device) <= of.t_wall and 0 < of.overlap <= 1
    assert json.loads(json.dumps(stats.to_dict()))["layers"]["3"]["tokens"] == 20


def test_the_bound_is_the_sum_of_the_plans(store):
    from goldsmith.offload.planning.plan import plan

    x, ids, weights = stores.call(store, 0, 1, 3)
    counts = torch.bincount(ids.view(-1), minlength=6)
    with engine_of(store, cache="none") as engine:
        for _ in range(4):
            engine(0, x, ids, weights)
        stats = engine.stats()
    wanted = plan(counts, (), stores.costs(store))
    assert stats.bound == pytest.approx(4 * wanted.predicted)
    assert stats.limiting == wanted.limiting and stats.bound_share == pytest.approx(stats.bound / stats.t_bound)


def test_stats_are_a_copy_and_reset_starts_over(store):
    with engine_of(store) as engine:
        engine(0, *stores.call(store, 0, 2, 2))
        before = engine.stats()
        engine(0, *stores.call(store, 0, 2, 2))
        assert (before.calls, engine.stats().calls) == (1, 2)
        engine.reset_stats()
        assert engine.stats().calls == 0 and before.layers[0].calls == 1


def test_counts_add_up():
    one, two = Counts(calls=1, t_cpu=0.5), Counts(calls=2, t_cpu=0.25)
    one.expect(0.001, "cpu")
    two.expect(0.002, "link")
    one.add(two)
    assert (one.calls, one.t_cpu, one.limiting) == (3, 0.75, "link")


def test_the_limiting_lane_is_weighted_by_time_not_calls():
    counts = Counts()
    counts.expect(0.01, "cpu")
    for _ in range(3):
        counts.expect(0.001, "link")
    assert counts.limiting == "cpu"


# -- explain


def test_the_explanation_names_budget_lanes_and_costs(store):
    with engine_of(store) as engine:
        for _ in range(3):
            engine(0, *stores.call(store, 0, 1, 3))
        explained = engine.explain()
        spending = engine.spending
    text, facts = str(explained), explained.to_dict()
    assert f"{spending.staging} slots for copies" in text
    assert f"{sum(spending.cache.values())} in the cache (lru)" in text
    assert "memory: the device is the CPU" in text
    assert re.search(r"decode .* ms per layer .*limited by \w+; cpu 2x: \+\d+ %, link 2x: \+\d+ %", text)
    assert re.search(r"prefill .* limited by", text) and "link and CPU break even at" in text
    assert re.search(r"so far +3 calls, .* ms predicted \(\d+ % of the predicted speed\), hit rate \d+ %", text)
    assert facts["budget"]["total"] == spending.total and facts["costs"]["link_bytes_per_s"] == 1e9
    assert facts["stream_tokens_per_expert"] == pytest.approx(1e11 * facts["costs"]["expert_bytes"] / 12288 / 1e9)
    assert json.loads(json.dumps(facts)) == facts


def test_the_explanation_shows_the_curve_behind_the_plan(store):
    curve, slow = ((1.0, 1e-4), (24.0, 3e-4), (240.0, 2e-3)), ((1.0, 2e-4), (24.0, 4e-4), (240.0, 2.5e-3))
    rates = dict(link_bytes_per_s=1e7, link_beside_bytes_per_s=5e6)
    settings = stores.calibration(store, cpu_curve=curve, cpu_beside_curve=slow, **rates)
    with engine_of(store, calibration=settings) as engine:
        explained = engine.explain()
    assert "us per expert on the CPU, by its tokens: 1: 100, 24: 300, 240: 2,000" in str(explained)
    assert "us per expert on the CPU while copies run, by its tokens: 1: 200, 24: 400" in str(explained)
    facts = explained.to_dict()
    assert json.loads(json.dumps(facts)) == facts
    copy = settings.costs.expert_bytes / 1e7
    assert 3e-4 < copy < 2e-3  # the line through the last two points passes there at n*
    assert facts["stream_tokens_per_expert"] == pytest.approx(24 + 216 * (copy - 3e-4) / 1.7e-3)
    assert facts["decode"]["twice_as_fast"]["cpu"] > 0.2  # a faster CPU has curves half as high


def test_a_faster_link_helps_if_the_link_limits(store):
    with engine_of(store, calibration=stores.calibration(store, cpu_bytes_per_s=1e7)) as engine:
        facts = engine.explain().to_dict()
    assert facts["decode"]["limiting"] == "link" and facts["decode"]["twice_as_fast"]["link"] > 0.5
    assert facts["decode"]["twice_as_fast"]["cpu"] == pytest.approx(0.0)


def test_amounts_are_readable(store):
    sizes = {5, 1536, 880640, 1021 * 2**30, 6 * 2**40, 5590 * 2**40}
    assert [_size(n) for n in sorted(sizes)] == ["5 bytes", "1.5 KiB", "860 KiB", "1,021 GiB", "6 TiB", "5,590 TiB"]
    quick = stores.calibration(store, device_bytes_per_s=2.96e12, cpu_bytes_per_s=99.96e9)
    with Engine(store, device="cpu", gpu_budget="1MiB", calibration=quick) as engine:
        text = str(engine.explain())
    assert "GB/s: cpu 100, link 1, dram 4, device 2,960;" in text and "e+" not in text


def test_a_lane_that_is_off_is_explained(store):
    with engine_of(store, gpu_budget=0) as engine:
        assert "device    off: gpu_budget=0: everything is computed on the CPU" in str(engine.explain())
        assert "copies" not in str(engine.explain())  # for a lane that is off
    with engine_of(store, gpu_budget="auto") as engine:  # the user did not ask for 0
        assert "device    off: no GPU is used, and gpu_budget='auto' takes no memory without one" in str(
            engine.explain()
        )
    with Engine(store, device="cpu") as engine:
        assert "not measured: no decision depends on them here" in str(engine.explain())


# -- trace


def read(path):
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return lanes, [e for e in events if e["ph"] == "X"]


def test_a_trace_has_a_thread_for_each_lane(store, tmp_path):
    path = tmp_path / "t.json"
    with engine_of(store, lanes="mixed") as engine:
        engine(0, *stores.call(store, 0, 1, 6))  # not in it
        with engine.trace(path):
            engine(3, *stores.call(store, 3, 5, 6))
            engine.flush()
    lanes, spans = read(path)
    assert {lanes[e["tid"]] for e in spans} == {"call", "cpu", "link", "device", "merge"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["args"]["layer"] == 3 for e in spans)
    copies = [e["args"] for e in spans if e["name"] == "copy"]
    assert len(copies) == 4 and all(c["bytes"] == store.expert_nbytes(3) and 0 <= c["expert"] < 6 for c in copies)
    (call,) = [e for e in spans if lanes[e["tid"]] == "call"]
    assert call["args"]["tokens"] == 5
    inside = [e for e in spans if lanes[e["tid"]] in ("cpu", "device", "merge")]
    assert all(call["ts"] <= e["ts"] and e["ts"] + e["dur"] <= call["ts"] + call["dur"] + 1 for e in inside)


def test_a_trace_is_complete_even_if_the_block_raises(store, tmp_path):
    path = tmp_path / "t.json"
    with engine_of(store) as engine:
        with pytest.raises(ZeroDivisionError), engine.trace(path):
            engine(0, *stores.call(store, 0, 1, 2))
            raise ZeroDivisionError
        assert read(path)[1]
        with engine.trace(path), pytest.raises(ValueError, match="a trace is being recorded already"):
            engine.trace(path).__enter__()
        with pytest.raises(OSError), engine.trace(tmp_path / "nowhere" / "t.json"):
            pass
        engine(0, *stores.call(store, 0, 1, 2))
