"""Routes in the order of the lanes: few are sorted in Python, many by torch, and both alike."""

import pytest
import torch

from goldsmith.offload import routes, routing


@pytest.mark.parametrize("T, k", [(0, 2), (1, 8), (9, 3), (20, 8)])
def test_few_and_many_routes_are_counted_and_sorted_alike(monkeypatch, T, k):
    ids = torch.randint(-1, 13, (T, k))
    found = []
    for few in (10**9, 0):
        monkeypatch.setattr(routes, "FEW", few)
        monkeypatch.setattr(routing, "FEW", few)
        counts, skips = routing.counted(0, ids, 12)
        kept = ids.masked_fill(ids == 12, -1)
        found.append((counts, skips, routes.sort_routes(kept, counts, [e for e in (7, 2) if counts[e]])))
    (counts, skips, one), (others, also, two) = found
    assert counts == others and skips == also == bool(((ids < 0) | (ids == 12)).any())
    order, place = torch.as_tensor(two.order, dtype=torch.int64), torch.as_tensor(two.place)
    assert one.order == order.tolist() and one.place == place.tolist()
    assert (one.start, one.leading) == (two.start, two.leading)
    kept, flat = ids.masked_fill(ids == 12, -1).view(-1), order
    assert len(flat) == int((kept >= 0).sum()) and (place[flat] == torch.arange(len(flat))).all()
    for e, at in one.start.items():
        assert (kept[flat[at : at + counts[e]]] == e).all()
    assert one.leading == counts[2] + counts[7]
