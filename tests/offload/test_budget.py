"""The division of a budget: within its limit, with at least two slots, and with no slot that nothing can use."""

import random

import pytest
import torch

from goldsmith.offload.engine import Engine
from goldsmith.offload.memory.budget import SPARE, STAGING, spend
from goldsmith.offload.settings import settings
from offload import stores


def settings_for(**changes):
    plain = dict(device="cpu", gpu_budget="auto", cache="lru", prefill="auto", guard="raise", lanes="auto", threads=1)
    return settings(**plain | {"adaptive": False} | changes)


def drawn(seed):
    """Random (budget, settings, slot_bytes, experts of each layer, row_bytes)."""
    make = random.Random(seed)
    slot = 4096 * make.choice([1, 2, 3, 40, 2304])
    experts = {2 * i: make.choice([1, 2, 5, 8, 64]) for i in range(make.choice([1, 2, 5, 27]))}
    every = slot * sum(experts.values())
    budget = make.choice([0, 1, slot, 2 * slot - 1, 2 * slot, 7 * slot, every // 3, every, 2 * every + 1, 20 * every])
    budget_settings = settings_for(
        cache=make.choice(["lru", "lfu", "none"]), prefill=make.choice(["auto", "cpu", "stream", "split", 100]),
        lanes=make.choice(["auto", "auto", "cpu", "copied"]),
    )  # fmt: skip
    row_bytes = make.choice([0, 0, 24 + 4 * 96, 24 + 4 * 2816])
    return (
        budget + bool(row_bytes) * make.choice([0, SPARE, SPARE + 64 * row_bytes]),
        budget_settings,
        slot,
        experts,
        row_bytes,
    )


@pytest.mark.parametrize("seeds", [range(0, 500), range(500, 1000)], ids=str)
def test_spending_stays_within_the_budget_and_every_slot_can_be_used(seeds):
    on = arenas = cached = 0
    for seed in seeds:
        budget, budget_settings, slot, experts, row_bytes = drawn(seed)
        shares = spend(budget, budget_settings, slot, experts, row_bytes)
        assert shares.total <= budget, (seed, shares)
        assert shares.total == sum(
            (
                (shares.staging + sum(shares.cache.values())) * slot, shares.arenas * shares.arena,
                shares.rows * row_bytes + (SPARE if shares.rows else 0),
            )
        ), seed  # fmt: skip
        assert all(0 <= shares.cache[layer] <= count for layer, count in experts.items()), seed
        if not shares.device_lane:
            need = 2 * slot + (64 * row_bytes + SPARE if row_bytes else 0)
            assert (shares.total, shares.arenas, sum(shares.cache.values())) == (0, 0, 0) and shares.why_off, seed
            assert budget < need and (budget == 0 or f"two slots need {need} bytes" in shares.why_off), seed
            continue
        on += 1
        assert 2 <= shares.staging <= min(STAGING, 2 * max(experts.values())) and not shares.why_off, seed
        if budget_settings.cache == "none":
            assert not any(shares.cache.values()), seed
        elif not shares.arenas:  # less than a slot remains, or every expert has one
            left = budget - shares.total
            assert left < slot or all(shares.cache[n] == c for n, c in experts.items()), seed
        few, many = min(shares.cache.values()), max(shares.cache.values())
        assert many - few <= 1 or few in experts.values(), (
            seed
        )  # each layer has equally many slots, up to its number of experts
        if shares.arenas:
            assert shares.arenas == 2 and shares.arena == max(experts.values()) * slot, seed
            assert budget_settings.prefill != "cpu" and budget_settings.lanes == "auto" and len(experts) > 1, seed
            arenas += 1
        cached += any(shares.cache.values())
    assert on > 200 and arenas > 20 and cached > 100  # the draws cover every kind of division


def test_the_budget_that_the_message_names_is_sufficient():
    for row_bytes in (0, 408, 11288):
        need = 2 * 40960 + (64 * row_bytes + SPARE if row_bytes else 0)
        off = spend(need - 1, settings_for(gpu_budget=need - 1), 40960, {0: 8, 1: 8}, row_bytes)
        assert not off.device_lane and f"two slots need {need} bytes" in off.why_off
        assert spend(need, settings_for(gpu_budget=need), 40960, {0: 8, 1: 8}, row_bytes).device_lane


def test_slots_that_a_small_layer_cannot_use_go_to_the_others():
    shares = spend((8 + 24) * 4096, settings_for(prefill="cpu"), 4096, {0: 2, 3: 64, 4: 64})
    assert shares.staging == 8 and dict(shares.cache) == {0: 2, 3: 11, 4: 11}


def test_arenas_take_at_most_half_of_the_remainder_unless_requested():
    experts = {0: 8, 1: 8}
    for prefill, slots, arenas in (
        ("stream", 20, 0),
        ("stream", 21, 2),
        ("auto", 39, 0),
        ("auto", 40, 2),
        ("cpu", 99, 0),
    ):
        assert spend(slots * 4096, settings_for(prefill=prefill), 4096, experts).arenas == arenas, (prefill, slots)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("can't allocate")])
def test_a_failed_allocation_says_what_to_do(tmp_path, monkeypatch, error):
    plain = torch.empty

    def full(*size, **options):
        if options.get("dtype") == torch.uint8:
            raise error
        return plain(*size, **options)

    with stores.build(tmp_path / "s") as store:
        monkeypatch.setattr("goldsmith.offload.lanes.slot_memory.torch.empty", full)
        with pytest.raises(MemoryError, match=r"\d+ bytes could not be allocated on cpu; lower gpu_budget"):
            Engine(store, device="cpu", gpu_budget="200kB", lanes="mixed")
        monkeypatch.undo()
        with Engine(store, device="cpu", gpu_budget="200kB", lanes="mixed") as engine:
            assert engine.spending.total <= 200_000
