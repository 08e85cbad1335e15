"""Which experts a recorded step finds on the device: what copies cost, and when their experts count."""

import numpy as np
import torch

from goldsmith.offload.decoding.residency import _MOST, EVERY, SHARE, Residency
from goldsmith.offload.memory.cache import Cache
from goldsmith.offload.memory.slots import Slot
from offload.whole_models import COSTS

E, K = 16, 4


def residency(layers=3, capacity=6, policy="lru"):
    caches = {
        layer: Cache(policy, [Slot(100 * layer + i, torch.empty(0), None) for i in range(capacity)], E)
        for layer in range(layers)
    }
    table = np.full((layers, E), -1, dtype=np.int32)
    made = Residency(tuple(range(layers)), caches, table, COSTS)
    made.read()
    return made


def steps(made, chosen, count):
    """Yields (uses so far, experts of this step, the CPU's routes, copies begun) of each step; checks the table."""
    uses = np.zeros(made.table.shape, dtype=np.int64)
    begun = []  # copies of the last two steps
    for step in range(count):
        made.advance()
        under_way = {(row, expert) for row, expert, _ in (begun[-1] if begun else ())}
        assert not any(made.table[row, expert] >= 0 for row, expert in under_way), "read while it is copied"
        slots = made.table[made.table >= 0].tolist()
        assert len(set(slots)) == len(slots), "a slot of two experts"
        experts = [chosen(step, row) for row in range(len(made.table))]
        on_cpu = 0
        for row, ids in enumerate(experts):
            uses[row, ids] += 1
            on_cpu += int((made.table[row, ids] < 0).sum())
        begun.append(list(made.choose(uses, on_cpu)))
        for row, expert, slot in begun[-1]:
            slot.owner = made.layers[row], expert  # as `fill` does
        taken = {slot.index for _, _, slot in begun[-1]}
        assert not taken & set(made.table[made.table >= 0].tolist()), "a slot that is still read gets new bytes"
        yield experts, on_cpu, begun[-1]


def test_copies_take_a_share_of_the_time_that_the_cpu_takes_anyway():
    generator, made = np.random.default_rng(0), residency()
    on_cpu = copies = 0
    for _, routes, begun in steps(made, lambda *_: generator.choice(E, K, replace=False), 400):
        on_cpu, copies = on_cpu + routes, copies + len(begun)
        spent = copies * COSTS.expert_bytes / COSTS.link_bytes_per_s
        assert spent <= SHARE * on_cpu * np.interp(1.0, *COSTS.cpu) + 1e-12
    assert copies


def test_a_text_that_uses_the_same_experts_soon_finds_them_on_the_device():
    made = residency()
    routes = [on_cpu for _, on_cpu, _ in steps(made, lambda step, row: [row, row + 3, row + 5], 200)]
    assert routes[0] == 9 and routes[-1] == 0


def test_an_expert_that_is_used_once_is_not_copied():
    made = residency(layers=1, capacity=2)
    seen = [begun for _, _, begun in steps(made, lambda step, row: [step % E], 3 * E)]
    assert not any(seen)


def test_a_cache_without_slots_or_costs_copies_nothing():
    for made in (residency(capacity=0), residency(policy="none")):
        assert not any(begun for _, _, begun in steps(made, lambda *_: [1, 2], 60))
    made = residency()
    made.costs = None
    assert not any(begun for _, _, begun in steps(made, lambda *_: [1, 2], 60))


def test_what_was_saved_up_is_bounded_and_an_eighth_of_the_layers_is_read_after_a_step():
    made = residency(layers=40, capacity=6)
    for _, _, begun in steps(made, lambda step, row: [row % 5, row % 5 + 1], 100):
        assert len(begun) <= _MOST and len({row % EVERY for row, _, _ in begun}) <= 1
    assert (made.table >= 0).sum() == 80


def test_a_prompt_that_changed_the_caches_is_read_anew():
    made = residency(layers=1)
    cache = made.caches[0]
    slot = cache.admit(7, ())
    assert made.read() == [slot] and made.table[0, 7] == slot.index and (made.table >= 0).sum() == 1
