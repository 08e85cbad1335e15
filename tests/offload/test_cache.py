"""The cache: what it evicts, what counts as cached, and how the plan uses it."""

import json
import time
from dataclasses import replace

import pytest
import torch

from goldsmith.offload.engine import Engine
from goldsmith.offload.lanes.slot_filling import SlotFilling
from goldsmith.offload.memory.budget import spend
from goldsmith.offload.memory.cache import Cache
from goldsmith.offload.memory.slots import Slot, SlotRing
from goldsmith.offload.memory.streams import Inline
from goldsmith.offload.observe.statistics import Counts
from goldsmith.offload.planning import assignment
from goldsmith.offload.planning.assignment import Assignment, assign
from goldsmith.offload.planning.call import Call
from goldsmith.offload.planning.plan import quickest
from goldsmith.offload.settings import settings
from offload import stores


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 1, 2), E=12)


def slots(count):
    return [Slot(i, torch.empty(0), None) for i in range(count)]


def filled(policy, calls, count=3, chosen=()):
    """A cache after these calls; each call is a list of used experts, and misses are admitted in order."""
    cache = Cache(policy, slots(count), 12, chosen)
    for used in calls:
        cache.used(dict.fromkeys(used, 1))
        for e in used:
            if e not in cache.resident():
                cache.admit(e, set(used))
    return cache


def test_lru_evicts_the_least_recently_used_expert():
    assert filled("lru", [[0], [1], [2], [0], [3]]).resident() == {0, 2, 3}


def test_lfu_keeps_frequently_used_experts_and_forgets_over_time():
    often = [[0], [0], [0], [1], [1], [2], [2]]
    assert filled("lfu", [*often, [3]]).resident() == {0, 1, 2}  # one use is less than two
    assert 0 not in filled("lfu", [*often, *([[3], [4], [1], [2]] * 8)]).resident()
    assert 0 not in filled("lfu", [*([[0]] * 20), *([[3], [4], [1], [2]] * 8)]).resident()  # 20 old uses, 8 recent ones


def test_lfu_ties_evict_the_lower_id_and_a_new_expert_evicts_no_equal():
    assert filled("lru", [[0, 1, 2], [3]]).resident() == {1, 2, 3}
    assert filled("lfu", [[0, 1, 2], [0, 1, 2], [3], [3], [3]]).resident() == {1, 2, 3}
    cache = filled("lfu", [[0, 1, 2]])
    cache.used({3: 1})
    assert cache.admit(3, {3}) is not None  # 1 is more than 0.9
    alike = filled("lfu", [[0]], count=1)
    alike.used({1: 1})
    alike._used[0] = alike._used[1]
    assert alike.admit(1, {1}) is None and alike.resident() == {0}


def test_an_evicted_slot_has_no_owner_and_the_eviction_is_counted():
    cache = filled("lru", [[0], [1], [2]])
    before = {e: cache.slot(e) for e in (0, 1, 2)}
    for e, slot in before.items():
        slot.owner = (0, e)
    cache.used({3: 1})
    assert (
        cache.admit(3, {3}) is before[0] and before[0].owner is None
    )  # the guard must not read old bytes as this expert's
    cache.forget(1)
    assert before[1].owner is None and 1 not in cache and cache.holds == 2 and cache.evictions == 1
    assert cache.admit(4, {4}) is before[1] and cache.evictions == 1  # the slot was free
    cache.clear()
    assert cache.holds == 0 and len(cache.slots()) == 3 and not any(slot.owner for slot in cache.slots())
    cache.close()
    assert cache.slots() == [] and 2 not in cache


def test_static_holds_only_the_chosen_experts():
    cache = filled("static", [[5], [1], [7], [2]], chosen=[7, 2, 9, 4])
    assert cache.resident() == {7, 2}  # 9 was not used, and 4 is beyond the three slots
    assert cache.evictions == 0


def test_a_cache_of_kind_none_stays_empty():
    assert filled("none", [[1], [2]]).resident() == frozenset()


def test_an_expert_that_the_call_needs_is_never_a_victim():
    cache = filled("lru", [[0], [1], [2]])
    cache.used({0: 1, 1: 1, 2: 1, 3: 1})
    assert cache.admit(3, {0, 1, 2, 3}) is None and cache.resident() == {0, 1, 2}
    assert cache.admit(3, {1, 2, 3}) is not None and cache.resident() == {1, 2, 3}


def engine_of(store, budget="400kB", cache="lru", **options):
    return Engine(store, device="cpu", gpu_budget=budget, cache=cache, calibration=stores.calibration(store), **options)


def zipf(store, calls, layer=0, T=1, k=3):
    """Calls of a router with favourites that change slowly, like a trained router's."""
    make = torch.Generator().manual_seed(0)
    E = store.num_experts(layer)
    share = 1 / torch.arange(1, E + 1).float() ** 1.5
    for i in range(calls):
        ids = torch.multinomial(share.roll(i // 20).expand(T, E), k, generator=make)
        yield torch.randn(T, store.hidden_size, generator=make).bfloat16(), ids, torch.rand(T, k, generator=make)


@pytest.mark.parametrize("cache", ["lru", "lfu", "none"])
def test_a_cache_changes_no_bit_and_the_same_calls_give_the_same_hits(store, cache):
    traffic = []
    for _ in range(2):
        with engine_of(store, cache=cache) as engine, Engine(store, device="cpu") as plain:
            for i, call in enumerate(zipf(store, 40)):
                assert torch.equal(engine(i % 3, *call), plain(i % 3, *call))
            stats = engine.stats()
            traffic.append((stats.hits, stats.misses, stats.uploads, stats.evictions, stats.bytes_h2d))
    assert traffic[0] == traffic[1]
    assert (traffic[0][0] > 0) == (cache != "none")


def test_a_cache_smaller_than_a_call_computes_in_waves(store):
    x, ids, weights = next(zipf(store, 1, T=6, k=12))
    with Engine(store, device="cpu") as plain:
        wanted = plain(0, x, ids, weights)
    block = store.expert_nbytes(0)
    with Engine(store, device="cpu", gpu_budget=7 * block, lanes="cached") as engine:
        assert max(engine.spending.cache.values()) < 12
        for _ in range(3):
            assert torch.equal(engine(0, x, ids, weights), wanted)


def test_an_admitted_expert_is_a_hit_from_the_next_call_on(store):
    call = next(zipf(store, 1))
    with engine_of(store, budget="1MiB") as engine:
        for _ in range(4):
            engine(0, *call)
        stats = engine.stats()
        assert stats.hits > 0 and stats.hits + stats.misses == 4 * 3
        engine.reset_stats()
        engine(0, *call)
        assert engine.stats().hit_rate == 1.0 and engine.stats().bytes_h2d == 0


def test_a_profile_makes_a_static_cache(store, tmp_path):
    with engine_of(store, budget="2MiB") as engine:
        for i, call in enumerate(zipf(store, 30)):
            engine(i % 3, *call)
        profile = engine.profile()
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    for placement in (profile, path, str(path)):
        with engine_of(store, budget="400kB", cache="static", profile=placement) as engine:
            wanted = {}
            for layer, counts in profile["counts"].items():
                best = sorted((e for e, n in enumerate(counts) if n), key=lambda e: (-counts[e], e))
                wanted[int(layer)] = set(best[: engine.spending.cache[int(layer)]])
            for i, call in enumerate(zipf(store, 30)):
                engine(i % 3, *call)
            assert all(engine._caches[layer].resident() <= chosen for layer, chosen in wanted.items())


def test_a_profile_counts_calls_and_not_tokens(store):
    x, weights = torch.randn(5, store.hidden_size).bfloat16(), torch.rand(5, 2)
    with Engine(store, device="cpu") as engine:
        for _ in range(3):
            engine(1, x, torch.tensor([[4, 4], [4, 7], [4, 4], [4, 4], [-1, 4]]), weights)
        counts = engine.profile()["counts"]
    assert counts["1"] == [0, 0, 0, 0, 3, 0, 0, 3, 0, 0, 0, 0] and sum(counts["0"]) == 0


def test_reset_stats_also_resets_evictions(store):
    block = store.expert_nbytes(0)
    with Engine(store, device="cpu", gpu_budget=7 * block, lanes="cached") as engine:
        slots = engine.spending.cache[0]
        call = next(zipf(store, 1, T=6, k=12))
        engine(0, *call)
        assert engine.stats().evictions == 12 - slots
        engine.reset_stats()
        engine(0, *call)
        assert engine.stats().layers[0].evictions == engine.stats().evictions == 12 - slots


# -- what is assigned


def assigned(store, counts, tokens, prefill="auto", cached=(), **changes):
    options = settings(device="cpu", gpu_budget="4MiB", cache="lru", prefill=prefill, guard="raise", lanes="auto",
                     threads=1, adaptive=False)  # fmt: skip
    spending = spend(4 << 20, options, store.expert_nbytes(0), {0: 12, 1: 12})
    cache = Cache("lru", slots(12), 12)
    for e in cached:
        cache.admit(e, ())
    return assign(counts, tokens, cache, options, spending, stores.costs(store, **changes))


def test_a_call_of_few_tokens_follows_the_plan(store):
    """The plan is looked up by token counts alone, in another order than the experts'."""
    make = torch.Generator().manual_seed(0)
    for round in range(200):
        counts = (torch.randint(0, 4, (12,), generator=make) * torch.randint(0, 2, (12,), generator=make)).tolist()
        cached = torch.randperm(12, generator=make)[: round % 5].tolist()
        changes = dict(cpu_bytes_per_s=10 ** (8.5 + round % 3 / 2), cpu_flops=1e8, device_latency=1e-6 * (round % 2))
        result = assigned(store, counts, 5, cached=cached, **changes)
        wanted = quickest(counts, cached, stores.costs(store, **changes))
        assert (result.cached, result.copied, result.cpu) == (wanted.cached, wanted.copied, wanted.cpu)
        assert result.predicted == pytest.approx(wanted.predicted, rel=1e-9)
        assert result.limiting == wanted.limiting or result.times[result.limiting] == result.times[wanted.limiting]


def test_forced_lanes_compute_the_experts_of_their_names(store):
    counts = [1, 5, 2, 9, 0, 5, 1, 0, 0, 3, 0, 7]
    used = tuple(e for e, n in enumerate(counts) if n)
    options = dict(
        device="cpu", gpu_budget="4MiB", cache="lru", prefill="auto", guard="raise", threads=1, adaptive=False
    )
    experts_by_lane = {}
    for lanes in ("cpu", "copied", "cached", "mixed"):
        placement = settings(lanes=lanes, **options)
        spending = spend(4 << 20, placement, store.expert_nbytes(0), {0: 12, 1: 12})
        reassigned = assign(counts, 33, Cache("lru", slots(12), 12), placement, spending, None)
        experts_by_lane[lanes] = reassigned.cpu, reassigned.copied, reassigned.cached
    assert experts_by_lane["cpu"] == (used, (), ()) and experts_by_lane["cached"] == ((), (), used)
    assert experts_by_lane["copied"] == ((), (3, 11, 1, 5, 9, 2, 0, 6), ())  # the most used first, ties by the lower id
    assert experts_by_lane["mixed"] == ((0, 3, 6, 9), (1,), (2, 5, 11))  # expert number mod 3


def test_misses_are_split_between_cpu_and_link_and_hits_stay_on_the_device(store):
    placement = assigned(store, [1] * 8 + [0] * 4, 1, cached=[0, 1])
    assert placement.cached == (0, 1)
    assert len(placement.copied) == len(placement.cpu) == 3  # a CPU and a link of the same speed
    assert placement.limiting == "link" and not placement.streamed


def test_uploads_take_the_slack_of_the_link_and_no_more(store):
    slow = {"cpu_bytes_per_s": 1e9, "link_bytes_per_s": 3e8, "dram_bytes_per_s": 1.1e9}
    placement = assigned(store, [1] * 6 + [0] * 6, 1, **slow)
    assert set(placement.uploads) <= set(placement.cpu) and len(placement.uploads) <= 2
    spare = placement.predicted - placement.times["link"]
    assert len(placement.uploads) * store.expert_nbytes(0) / 3e8 <= spare


@pytest.mark.parametrize("tokens, count", [(1, 1), (3, 2), (400, 99)])
def test_a_call_too_small_for_the_device_stays_on_the_cpu(store, tokens, count):
    """Neither cached experts nor uploads go to the device."""
    counts, used = [count] * 8 + [0] * 4, tuple(range(8))
    placement = assigned(store, counts, tokens, cached=[0, 1], device_latency=1.0)
    assert (placement.cached, placement.copied, placement.cpu, placement.uploads) == ((), (), used, ())
    assert placement.limiting == "cpu" and placement.predicted == placement.times["cpu"] < 1.0


@pytest.mark.parametrize("tokens, count", [(1, 1), (3, 2), (400, 99)])
def test_when_only_the_split_costs_experts_are_uploaded_until_all_are_cached(store, tokens, count):
    counts, used = [count] * 8 + [0] * 4, tuple(range(8))
    placement = assigned(store, counts, tokens, "split", cached=[0, 1], split_latency=1.0, link_latency=1.0)
    assert (placement.cached, placement.copied, placement.cpu) == ((), (), used)
    assert placement.uploads == (2, 3)  # 0 and 1 are cached
    placement = assigned(store, counts, tokens, "split", cached=used, split_latency=1.0, link_latency=1.0)
    assert (placement.cached, placement.cpu) == (used, ())


@pytest.mark.parametrize("tokens, count", [(1, 1), (3, 2), (400, 99)])
@pytest.mark.parametrize("prefill", ["auto", "split", 1000])
def test_the_shortcut_for_device_cpu_agrees_with_the_plan(store, monkeypatch, tokens, count, prefill):
    same = dict(device_bytes_per_s=1e9, device_flops=1e11, cpu_latency=1e-5, device_latency=2e-5, shared=True)
    counts = [0, *[count] * 7, count + 1, 0, 0, 1]
    placement = assigned(store, counts, tokens, prefill, cached=[1, 2], **same)
    monkeypatch.setattr(assignment, "_cpu_is_all", lambda costs: False)
    wanted = assigned(store, counts, tokens, prefill, cached=[1, 2], **same)
    assert placement == replace(wanted, predicted=pytest.approx(wanted.predicted), times=placement.times)
    assert placement.cpu == (*range(1, 9), 11) and not placement.uploads


def test_the_shortcut_applies_only_if_the_device_is_never_quicker(store):
    curve = ((1.0, 1e-5), (24.0, 4e-5), (240.0, 2e-4))
    same = stores.costs(store, cpu_curve=curve, device_curve=curve, shared=True)
    assert assignment._cpu_is_all(same)
    assert not assignment._cpu_is_all(replace(same, shared=False))
    for quicker in (
        ((24.0, 4e-5), (240.0, 1e-4)),
        ((1.0, 5e-6), *curve[1:]),
        ((1.0, 1e-5), (24.0, 3e-5), (240.0, 2e-4)),
    ):
        assert not assignment._cpu_is_all(replace(same, device_curve=quicker))


def test_uploads_never_evict_an_expert_that_the_call_uses():
    # 3 is not used and may be evicted for 2; what was copied for this call also stays, so 2 does not evict 4
    for resident, wanted, there in (((0, 1), (2,), {0, 1}), ((0, 3), (2,), {0, 2}), ((0, 3), (2, 4), {0, 2})):
        cache = filled("lru", [resident], count=2)
        placement = Assignment(cached=tuple(e for e in resident if e < 2), cpu=wanted, uploads=wanted)
        x = torch.zeros(3, 1)
        call = Call(0, 1, x, x, torch.zeros(3, 1, dtype=torch.int64), x, [1] * 5, placement, cache, Counts())
        filling = SlotFilling(call, SlotRing(slots(2)), Inline(), lambda *of: None, keep=True)
        assert [[e for e, _ in wave] for wave in filling.waves(call.tally)] == [list(placement.cached)]
        assert cache.resident() == there


def test_uploads_change_no_bit(store):
    dear = stores.calibration(store, split_latency=1.0, link_latency=1.0)
    with Engine(store, device="cpu", gpu_budget="4MiB", calibration=dear) as engine, Engine(store, device="cpu") as cpu:
        for call in zipf(store, 40):
            assert torch.equal(engine(0, *call), cpu(0, *call))
        stats = engine.stats()
        assert stats.uploads >= stats.experts_cached / 40 > 0 and stats.experts_copied == 0


@pytest.mark.parametrize("prefill, tokens, streamed", [
    ("auto", 400, True), ("auto", 16, False), ("stream", 17, True), ("stream", 16, False), ("cpu", 400, False),
    ("split", 400, False), (100, 99, False), (100, 100, True), (1, 1, True),
])  # fmt: skip
def test_prompts_are_streamed_if_it_pays_or_on_request(store, prefill, tokens, streamed):
    placement = assigned(store, [max(1, tokens // 4)] * 12, tokens, prefill, cpu_flops=1e8, dram_bytes_per_s=1e12)
    assert placement.streamed == streamed
    if prefill == "cpu":
        assert len(placement.cpu) == 12


@pytest.mark.parametrize("changes, limiting", [
    ({}, "link"), ({"dram_bytes_per_s": 5e8}, "dram"), ({"device_flops": 1e8}, "device"),
])  # fmt: skip
def test_a_streamed_prompt_is_limited_by_its_slowest_lane(store, changes, limiting):
    placement = assigned(store, [100] * 12, 400, "stream", cached=[0, 5], **changes)
    assert (
        placement.streamed and placement.limiting == limiting and placement.predicted == max(placement.times.values())
    )
    assert placement.cached == (0, 5) and placement.predicted == placement.times[limiting]


@pytest.mark.parametrize("prefill", ["stream", "split", "cpu", "auto"])
def test_a_prompt_gives_the_same_bits_with_every_prefill(store, prefill):
    calls = list(zipf(store, 6, T=60))
    with Engine(store, device="cpu") as plain, engine_of(store, "2MiB", prefill=prefill) as engine:
        for _ in range(2):  # the layers in order, twice: the next layer's copy begins while this one is computed
            for layer in (0, 1, 2):
                assert torch.equal(engine(layer, *calls[layer]), plain(layer, *calls[layer]))
        if prefill == "stream":
            assert engine.spending.arenas == 2 and engine.stats().experts_copied > 0


def test_the_next_layers_copies_begin_while_this_one_is_computed(store):
    calls = list(zipf(store, 3, T=60))
    with engine_of(store, "2MiB", prefill="stream", cache="none") as engine:
        copy = engine._lanes._copy
        engine._lanes._copy = lambda *of: (time.sleep(0.002), copy(*of))  # `flush` waits for work under way
        engine(0, *calls[0])
        engine.flush()
        copied = engine.stats().layers[1].bytes_h2d
        assert copied == 12 * store.expert_nbytes(1)
        engine(1, *calls[1])
        engine.flush()
        assert engine.stats().layers[1].bytes_h2d == copied


def test_adaptive_costs_follow_the_lanes_and_other_costs_stay(store):
    from goldsmith.offload.planning.adaptation import AdaptiveCosts

    placement = stores.costs(store)
    adapting = AdaptiveCosts(placement)
    for _ in range(100):  # a CPU three times as slow, and a link twice as slow as calibrated
        expected = 1e-3 * placement.cpu_bytes_per_s / adapting.costs.cpu_bytes_per_s
        adapting.learn(expected, 3e-3, 4, 2 * placement.expert_bytes / placement.link_bytes_per_s)
    assert placement.cpu_bytes_per_s / adapting.costs.cpu_bytes_per_s == pytest.approx(3, rel=0.01)
    assert adapting.costs.link_bytes_per_s / placement.link_bytes_per_s == pytest.approx(2, rel=0.01)
    curves = dict(cpu_curve=[(1, 1e-5), (24, 4e-5)], cpu_beside_curve=[(1, 2e-5), (24, 6e-5)])
    adapting = AdaptiveCosts(replace(placement, **curves, link_beside_bytes_per_s=placement.link_bytes_per_s / 2))
    for _ in range(100):
        adapting.learn(
            adapting.costs.cpu_curve[0][1], 3e-5, 4, 2 * placement.expert_bytes / placement.link_bytes_per_s * 4
        )
    assert [t for _, t in adapting.costs.cpu_curve] == pytest.approx([3e-5, 12e-5], rel=0.01)
    assert [t for _, t in adapting.costs.cpu_beside_curve] == pytest.approx([6e-5, 18e-5], rel=0.01)
    assert adapting.costs.link_bytes_per_s / adapting.costs.link_beside_bytes_per_s == pytest.approx(2)
    adapting = AdaptiveCosts(placement)
    for _ in range(200):  # a machine that slept, and a clock that did not move: at most a factor of 8 either way
        adapting.learn(1e-6, 3600.0, 1, 3600.0)
    assert placement.cpu_bytes_per_s / adapting.costs.cpu_bytes_per_s == pytest.approx(8)
    assert placement.link_bytes_per_s / adapting.costs.link_bytes_per_s == pytest.approx(8)
    for adaptive in (False, True):
        with engine_of(store, adaptive=adaptive) as engine:
            for call in zipf(store, 20):
                engine(0, *call)
            assert (engine._costs == placement) == (not adaptive)
