"""Routes in the order of the lanes: few are sorted in Python, many by numpy, with the same result."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from goldsmith.offload.lanes import call_checks, route_order


@pytest.mark.parametrize("T, k", [(0, 2), (1, 8), (9, 3), (20, 8)])
def test_few_and_many_routes_are_counted_and_sorted_in_the_same_way(monkeypatch, T, k):
    ids = torch.randint(-1, 13, (T, k))
    items = []
    for few in (10**9, 0):
        monkeypatch.setattr(route_order, "FEW", few)
        monkeypatch.setattr(call_checks, "FEW", few)
        counts, skips = call_checks.count_tokens(0, ids, 12)
        kept = ids.masked_fill(ids == 12, -1)
        items.append((counts, skips, route_order.sort_routes(kept, counts, [e for e in (7, 2) if counts[e]])))
    (counts, skips, one), (others, also, two) = items
    assert counts == others and skips == also == bool(((ids < 0) | (ids == 12)).any())
    order, place = torch.as_tensor(two.order, dtype=torch.int64), torch.as_tensor(two.place)
    assert one.order == order.tolist() and one.place == place.tolist()
    assert (one.start, one.leading) == (two.start, two.leading)
    kept, flat = ids.masked_fill(ids == 12, -1).view(-1), order
    assert len(flat) == int((kept >= 0).sum()) and (place[flat] == torch.arange(len(flat))).all()
    for e, at in one.start.items():
        assert (kept[flat[at : at + counts[e]]] == e).all()
    assert one.leading == counts[2] + counts[7]


class Seen(TorchDispatchMode):
    """The names of torch's operations; `detach` is how numpy accesses a tensor's memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is not torch.ops.aten.detach.default:
            self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def test_a_prompts_routes_are_sorted_without_torchs_threads():
    """Torch's threads stay awake for 12 ms after an operation, on cores that the CPU lane is about to use."""
    ids = torch.stack([torch.randperm(12)[:8] for _ in range(600)])
    with Seen() as seen:
        counts, _ = call_checks.count_tokens(0, ids, 12)
        route_order.sort_routes(ids, counts, [3, 5])
        assert not seen.names
        ids[0, 0] = 12  # and one that stands for no expert
    seen.names.clear()
    with seen:
        assert call_checks.count_tokens(0, ids, 12)[1] and not seen.names
