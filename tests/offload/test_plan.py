"""The scheduler: its formulas, its ties, its errors, and the distance of the best cut from the best of all splits."""

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from goldsmith.offload import Costs, plan, predict_stream
from goldsmith.offload.planning.plan import on_cpu, quickest

QWEN3 = dict(  # an expert of Qwen3-30B in bfloat16, with rates near those of an H100 and 16 cores
    expert_bytes=9_437_184, flops_per_token=9_437_184, cpu_bytes_per_s=104e9, cpu_flops=2e12, link_bytes_per_s=50e9,
    dram_bytes_per_s=150e9, device_bytes_per_s=2e12, device_flops=3e14, cpu_latency=2e-5, link_latency=1e-5,
    device_latency=2e-5,
)  # fmt: skip


def costs(**other):
    return Costs(**QWEN3 | other)


def seconds(tokens, curve, bytes_per_s, flops, c):
    """Seconds of an expert: interpolation between points, or without points the roofline of bytes and operations."""
    if not curve:
        return max(c.expert_bytes / bytes_per_s, c.flops_per_token * tokens / flops)
    if tokens <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    (m, low), (n, high) = next((pair for pair in itertools.pairwise(curve) if tokens <= pair[1][0]), curve[-2:])
    return low + (high - low) * (tokens - m) / (n - m)


def lanes(n, cached, copied, c):
    """T_cpu, T_link, T_dram, T_dev and, if the costs have it, T_both: one formula each."""
    S = c.expert_bytes

    def g(tokens):
        return seconds(tokens, c.device_curve, c.device_bytes_per_s, c.device_flops, c)

    def t(tokens, curve):
        return seconds(tokens, curve, c.cpu_bytes_per_s, c.cpu_flops, c)

    used = [e for e in range(len(n)) if n[e]]
    cached_used = [e for e in used if e in cached]
    cpu = [e for e in used if e not in cached and e not in copied]
    alone, beside = (sum(t(n[e], curve) for e in cpu) for curve in (c.cpu_curve, c.cpu_beside_curve or c.cpu_curve))
    copies, slow_copies = (len(copied) * S / (rate or c.link_bytes_per_s) for rate in (None, c.link_beside_bytes_per_s))
    work, link = alone, copies
    if cpu and copied:  # both are slow until one of them finishes; then the other goes on as if alone
        if beside <= slow_copies:
            work, link = beside, beside + copies * (1 - beside / slow_copies)
        else:
            work, link = slow_copies + alone * (1 - slow_copies / beside), slow_copies
    times = {
        "cpu": c.cpu_latency + work if cpu else 0.0,
        "link": c.link_latency + link + g(min(n[e] for e in copied)) if copied else 0.0,
        "dram": (len(cpu) + len(copied)) * S / c.dram_bytes_per_s,
        "device": c.device_latency + sum(g(n[e]) for e in [*cached_used, *copied]) if cached_used or copied else 0.0,
    }
    if c.shared or c.split_latency:
        split = cpu and (cached_used or copied)
        one_after_the_other = times["cpu"] + times["device"] if c.shared else 0.0
        times["both"] = max(c.split_latency, one_after_the_other) if split else 0.0
    return times


def best_of_all(n, cached, c):
    missing = [e for e in range(len(n)) if n[e] and e not in cached]
    splits = itertools.chain.from_iterable(itertools.combinations(missing, r) for r in range(len(missing) + 1))
    return min(max(lanes(n, cached, copied, c).values()) for copied in splits)


def powers(low, high):
    return st.floats(low, high).map(lambda x: 10.0**x)


@st.composite
def machines(draw, device_is_free=False):
    """A CPU, and a device with at least 5 times its bytes and 10 times its operations per second."""
    cpu, flops, link = draw(powers(9.5, 11.3)), draw(powers(10.5, 13)), draw(powers(9.7, 11))
    many, much = (math.inf, math.inf) if device_is_free else (draw(powers(0.7, 2)), draw(powers(1, 2.5)))
    return Costs(
        expert_bytes=draw(powers(5, 7.5)), flops_per_token=draw(powers(5, 7.5)), cpu_bytes_per_s=cpu, cpu_flops=flops,
        link_bytes_per_s=link, dram_bytes_per_s=max(cpu, link) * draw(st.floats(1, 2)), device_bytes_per_s=many * cpu,
        device_flops=much * flops, cpu_latency=draw(powers(-6, -4)), link_latency=draw(powers(-6, -4.5)),
        device_latency=0.0 if device_is_free else draw(powers(-6, -4.5)),
    )  # fmt: skip


@st.composite
def curves(draw):
    """Random increasing points (n, seconds), with steps and flat parts, often not convex."""
    n = sorted(draw(st.sets(st.sampled_from([1, 2, 4, 16, 32, 64, 128, 256]), min_size=1, max_size=5)))
    rises = draw(st.lists(st.one_of(st.just(0.0), powers(-6, -3)), min_size=len(n), max_size=len(n)))
    return tuple(zip(n, itertools.accumulate(rises, initial=draw(powers(-5, -3.5))), strict=False))


@st.composite
def measured(draw, device_is_free=False):
    """A machine whose lanes have curves and slow each other down; the device needs at most a tenth of the CPU's t."""
    c, cpu = draw(machines(device_is_free)), draw(curves())
    more = itertools.accumulate(draw(st.lists(powers(-7, -4), min_size=len(cpu), max_size=len(cpu))))
    share = draw(powers(-3, -1))
    return replace(
        c, cpu_curve=cpu, cpu_beside_curve=tuple((n, t + m) for (n, t), m in zip(cpu, more, strict=True)),
        device_curve=() if device_is_free else tuple((n, share * t) for n, t in cpu),
        link_beside_bytes_per_s=c.link_bytes_per_s * draw(st.floats(0.3, 1)),
    )  # fmt: skip


ANY, FREE = st.one_of(machines(), measured()), st.one_of(machines(True), measured(True))
TOKENS = st.lists(st.one_of(st.sampled_from([0, 1, 2, 5, 30, 300]), st.integers(0, 400)), min_size=1, max_size=8)


def splitting(c, data):
    """The same machine where a split costs extra, or the device is the CPU."""
    return replace(c, split_latency=data.draw(powers(-6, -3)), shared=data.draw(st.booleans()))


@given(TOKENS, st.data(), ANY)
def test_a_split_with_its_own_cost_is_no_worse_than_one_lane(n, data, c):
    c = splitting(c, data)
    result = plan(n, (), c)
    missing = [e for e in range(len(n)) if n[e]]
    alone = [max(lanes(n, (), copied, c).values()) for copied in ((), missing)]
    assert result.predicted <= min(alone) * (1 + 1e-12)
    assert result.lane_times == pytest.approx(lanes(n, (), result.copied, c), rel=1e-12)
    assert plan(n, (), replace(c, shared=False)).predicted <= result.predicted


@given(TOKENS, st.data(), ANY)
def test_a_call_runs_on_the_cpu_if_that_beats_the_cached_experts(n, data, c):
    c = splitting(c, data)
    cached = data.draw(st.sets(st.integers(0, len(n) - 1)))
    split, alone, result = plan(n, cached, c), on_cpu(n, c), quickest(n, cached, c)
    assert alone.lane_times == pytest.approx(lanes(n, (), (), replace(c, shared=False, split_latency=0.0)), rel=1e-12)
    assert alone.cpu == tuple(e for e in range(len(n)) if n[e]) and alone.predicted == max(alone.lane_times.values())
    assert result == (alone if alone.predicted <= split.predicted else split)


@given(TOKENS, st.data(), ANY)
def test_the_prediction_equals_the_formulas(n, data, c):
    cached = data.draw(st.sets(st.integers(0, len(n) - 1)))
    result = plan(n, cached, c)
    wanted = lanes(n, cached, result.copied, c)
    assert result.lane_times == pytest.approx(wanted, rel=1e-12)  # the same numbers, summed in another order
    assert result.predicted == max(result.lane_times.values())
    if any(n):
        assert result.lane_times[result.limiting] == result.predicted
    parts = [*result.cached, *result.copied, *result.cpu]
    assert sorted(parts) == [e for e in range(len(n)) if n[e]]
    assert set(result.cached) == {e for e in cached if n[e]}
    assert result.cached == tuple(sorted(result.cached)) and result.cpu == tuple(sorted(result.cpu))


@given(TOKENS, st.data(), ANY)
def test_it_is_within_a_tenth_of_the_best_of_all_splits(n, data, c):
    cached = data.draw(st.sets(st.integers(0, len(n) - 1)))
    best = best_of_all(n, cached, c)
    assume(best)
    assert plan(n, cached, c).predicted <= 1.1 * best


@given(TOKENS, st.data(), FREE)
def test_it_is_the_best_of_all_splits_if_the_device_takes_no_time(n, data, c):
    cached = data.draw(st.sets(st.integers(0, len(n) - 1)))
    assert plan(n, cached, c).predicted == pytest.approx(best_of_all(n, cached, c), rel=1e-12)


def test_of_a_tokens_eight_experts_six_run_on_the_cpu_and_two_are_copied():
    result = plan([1] * 8, (), costs())
    assert (result.copied, result.cpu, result.limiting) == ((0, 1), (2, 3, 4, 5, 6, 7), "cpu")
    assert round(result.predicted * 1e3, 2) == 0.56


def test_the_largest_counts_are_copied_first_and_ties_go_to_the_lower_id():
    result = plan([1, 400, 1, 400, 7], (), costs(cpu_flops=1e10))
    assert result.copied == (1, 3, 4, 0, 2)


def test_of_equal_splits_the_one_with_the_fewest_copies_is_taken():
    free = dict(cpu_latency=0.0, link_latency=0.0, device_latency=0.0, device_bytes_per_s=math.inf)
    even = dict(cpu_bytes_per_s=1e9, link_bytes_per_s=1e9, dram_bytes_per_s=1e9, cpu_flops=math.inf)
    result = plan([1] * 4, (), costs(**free, **even, device_flops=math.inf))
    assert (result.copied, result.limiting) == ((), "cpu")  # DRAM takes equally long for every split


def test_a_cached_expert_stays_on_the_device_and_unused_experts_are_in_no_lane():
    result = plan([0, 3, 0, 1], [0, 1], costs())
    assert result.cached == (1,) and 0 not in result.copied + result.cpu and 2 not in result.copied + result.cpu


def test_nothing_to_do_takes_no_time():
    for nothing in ([], [0, 0]):
        result = plan(nothing, (), costs())
        assert (result.predicted, result.limiting) == (0.0, "none")
        assert set(result.lane_times.values()) == {0.0}


def test_counts_may_be_a_list_a_tensor_or_an_array():
    n = [3, 0, 9, 1]
    items = [plan(counts, {2}, costs()) for counts in (n, tuple(n), torch.tensor(n), np.array(n, dtype=np.int32))]
    assert all(one == items[0] for one in items)


def test_streaming_pays_when_one_expert_on_the_cpu_takes_longer_than_all_copies():
    few, many = [1] * 8 + [0] * 120, [6000] * 128
    assert predict_stream(few, (), costs()) > plan(few, (), costs()).predicted
    assert predict_stream(many, (), costs()) < plan(many, (), costs()).predicted
    layer = 128 * QWEN3["expert_bytes"] / 50e9
    assert predict_stream(few, (), costs()) == pytest.approx(layer + 1e-5)
    assert predict_stream(few, range(128), costs()) == plan(few, range(128), costs()).predicted
    slow = costs(dram_bytes_per_s=10e9)  # memory slower than the link
    assert predict_stream(few, range(28), slow) == pytest.approx(100 * QWEN3["expert_bytes"] / 10e9)
    assert predict_stream([0] * 8, (), costs()) > 0 == predict_stream([0] * 8, range(8), costs())


WRONG = {
    "negative": ([1, -2], (), ValueError, r"counts\[1\] is -2, expected a number of tokens, at least 0"),
    "fractions": ([0.5], (), TypeError, "dtype float64, expected E whole numbers"),
    "two dimensions": ([[1]], (), TypeError, r"the shape \[1, 1\]"),
    "beyond": ([1, 1], [2], ValueError, r"cached has the expert 2, expected 0\.\.1"),
    "below": ([1, 1], [-1], ValueError, r"cached has the expert -1, expected 0\.\.1"),
}


@pytest.mark.parametrize("counts, cached, kind, text", WRONG.values(), ids=list(WRONG))
def test_invalid_counts_and_experts_are_refused(counts, cached, kind, text):
    with pytest.raises(kind, match=text):
        plan(counts, cached, costs())


@pytest.mark.parametrize("name", [name for name in QWEN3 if "per_s" in name or name.endswith("_flops")])
def test_rates_must_be_above_zero(name):
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"{name}={value}, expected a rate above 0"):
            costs(**{name: value})


WRONG_CURVES = {
    "falls": ([(1, 2e-4), (4, 1e-4)], ValueError, r"point \(4, 0.0001\) after \(1, 0.0002\)"),
    "no time": ([(1, 0.0)], ValueError, "seconds must be above 0"),
    "twice": ([(4, 1e-4), (4, 1e-4)], ValueError, "tokens must be above 0 and increase"),
    "endless": ([(1, math.inf)], ValueError, "point"),
    "no pairs": ([1, 2], TypeError, r"expected pairs \(tokens, seconds\)"),
}


@pytest.mark.parametrize("curve, kind, text", WRONG_CURVES.values(), ids=list(WRONG_CURVES))
def test_curves_must_not_decrease(curve, kind, text):
    for name in ("cpu_curve", "device_curve"):
        with pytest.raises(kind, match=f"{name}.*{text}"):
            costs(**{name: curve})


def test_costs_that_are_quicker_in_parallel_are_refused():
    with pytest.raises(ValueError, match="the CPU cannot be faster while copies run"):
        costs(cpu_curve=[(1, 2e-4), (64, 4e-4)], cpu_beside_curve=[(1, 2e-4), (64, 3e-4)])
    with pytest.raises(ValueError, match="a copy cannot be faster while the CPU computes"):
        costs(link_beside_bytes_per_s=60e9)
    with pytest.raises(ValueError, match="cpu_beside_curve needs cpu_curve"):
        costs(cpu_beside_curve=[(1, 2e-4)])


def test_break_even_is_where_copy_and_cpu_take_equally_long():
    assert costs().break_even() == pytest.approx(2e12 / 50e9)
    copy = QWEN3["expert_bytes"] / 50e9
    assert costs(cpu_curve=[(1, copy / 2), (9, copy), (10, 2 * copy)]).break_even() == pytest.approx(9)
    assert costs(cpu_curve=[(1, copy / 2), (9, copy / 2), (13, 3 / 4 * copy)]).break_even() == pytest.approx(17)
    assert costs(cpu_curve=[(1, 2 * copy)]).break_even() == 0
    assert costs(cpu_curve=[(1, copy / 2)]).break_even() == math.inf


@pytest.mark.parametrize("name", ["expert_bytes", "flops_per_token", "cpu_latency", "link_latency", "device_latency"])
def test_times_and_sizes_must_be_at_least_zero(name):
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"{name}={value}, expected a finite number of at least 0"):
            costs(**{name: value})
    with pytest.raises(TypeError, match=f"{name}='fast' is of type str, expected a number"):
        costs(**{name: "fast"})


def test_costs_are_keyword_only_and_required():
    with pytest.raises(TypeError):
        Costs(1.0)
    with pytest.raises(TypeError, match="device_latency"):
        Costs(**{name: value for name, value in QWEN3.items() if name != "device_latency"})


def calls_of(experts):
    """How many functions, of Python and of C, a plan of so many experts calls; run once before to fill caches."""
    cpu = [(n, 8e-5 + 2e-6 * n) for n in (1, 4, 16, 32, 64, 128, 256)]
    beside, device = [(n, 2 * t) for n, t in cpu], [(n, t / 50) for n, t in cpu]
    c = costs(cpu_curve=cpu, cpu_beside_curve=beside, device_curve=device, link_beside_bytes_per_s=45e9)
    counts, cached = np.arange(1, experts + 1) % 60 + 1, frozenset(range(0, experts, 4))
    plan(counts, cached, c)
    seen = [0]

    def call(frame, event, argument):
        seen[0] += event in ("call", "c_call")

    sys.setprofile(call)
    try:
        plan(counts, cached, c)
    finally:
        sys.setprofile(None)
    return seen[0]


def test_a_plan_makes_as_many_calls_for_256_experts_as_for_16():
    """50 us leave room for some 80 calls on whole arrays: `python -m benchmarks.promises plan` times them."""
    assert calls_of(16) == calls_of(64) == calls_of(256) == calls_of(1024) < 100
