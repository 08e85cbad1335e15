"""Routes: the routes (token, slot) of a call, grouped by expert.

T tokens with k slots each, P = T k routes; route t k + j is slot j of token t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ._conventions import flat


class Routes:
    """The routes of each of E experts, from topk_ids [..., k]. Raises ValueError for ids outside [-1, E)."""

    def __init__(self, op: str, topk_ids: Tensor, experts: int) -> None:
        check_ids(op, topk_ids, experts)
        ids = flat(topk_ids).long()
        self.tokens, self.k = ids.shape
        self.experts = experts
        self.skipped = ids.reshape(-1) < 0
        order = torch.where(self.skipped, experts, ids.reshape(-1)).sort(stable=True).indices
        self._order, self._place = order, order.argsort()
        self._counts: list[int] = torch.bincount(ids.reshape(-1) + 1, minlength=experts + 1).tolist()

    def of_each(self) -> Iterator[tuple[int, Tensor]]:
        """(expert, its routes in ascending order) for every expert with routes."""
        first = 0
        for expert, count in enumerate(self._counts[1:]):
            if count:
                yield expert, self._order[first : first + count]
            first += count

    def token(self, routes: Tensor) -> Tensor:
        """The token of each of these routes."""
        return routes // max(1, self.k)

    def gather(self, rows: Tensor, width: int, of_expert: Callable[[int, Tensor], Tensor]) -> Tensor:
        """[P, width]: the results of `of_expert(expert, its routes)` in the order of the routes, 0 for skipped ones."""
        results = [of_expert(expert, routes) for expert, routes in self.of_each()]
        results.append(rows.new_zeros(self._counts[0], width))
        return torch.cat(results).index_select(0, self._place)

    def sum_slots(self, values: Tensor) -> Tensor:
        """[T, width]: the sum over a token's slots of [P, width]."""
        return values.view(self.tokens, self.k, values.shape[-1]).sum(1)

    def kept(self, weights: Tensor) -> Tensor:
        """[..., k] -> [P], with 0 for skipped slots, even if their weight is NaN or Inf."""
        return weights.reshape(-1).masked_fill(self.skipped, 0.0)


def check_ids(op: str, topk_ids: Tensor, experts: int) -> None:
    """Raise ValueError at the first id outside [-1, experts). Synchronises with the device."""
    if not topk_ids.numel():
        return
    least, most = torch.aminmax(topk_ids)
    if int(least) >= -1 and int(most) < experts:
        return
    place = ((topk_ids < -1) | (topk_ids >= experts)).nonzero()[0].tolist()
    raise ValueError(
        f"{op}: topk_ids{place} is {int(topk_ids[tuple(place)])}, expected an expert in 0..{experts - 1}, or -1 to "
        "skip the slot"
    )
