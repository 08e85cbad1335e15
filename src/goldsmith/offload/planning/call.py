"""One call of the Engine, and what its lanes made of it: what the guard keeps until the flags are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..memory.cache import Cache
from ..memory.slots import Slot
from ..observe.statistics import Counts
from .assignment import Assignment

UNWRITTEN = 255  # a flag that no lane has set


@dataclass(eq=False)
class Call:
    """x [T, H] as the lanes take it (`given` is the caller's), ids [T, k] on the CPU with -1 where a slot is skipped,
    weights [T, k] with 0 there, on the engine's device: float32, or on a GPU as they were given.
    """

    layer: int
    number: int
    given: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor
    counts: list[int]
    assignment: Assignment
    cache: Cache
    tally: Counts
    first_row: int = 0  # of this call's tokens, where the caller's were too many for one
    positions: int = 0  # of each sequence in the caller's tokens, where known
    following: tuple[int, tuple[int, ...]] | None = None  # the next layer, and its experts that are not in its cache

    @property
    def routes(self) -> int:
        return self.ids.numel()

    @property
    def tokens(self) -> int:
        return self.x.shape[0]


@dataclass(eq=False)
class Outcome:
    """rows [*, H] float32, out [T, H] in the caller's dtype; flags [T k]: 0, 1 not finite, 255 never written

    flags   None where no kernel sets them
    place   the row of each route, -1 where it is skipped; None: rows are in the order of the routes
    slots   where a device lane read an expert, and the slot's generation then
    host    rows of the lane cpu before they were brought to the device, and the routes that they are of
    """

    rows: Tensor
    flags: Tensor | None
    out: Tensor
    place: Tensor | np.ndarray | list[int] | None = None
    slots: dict[int, tuple[Slot, int]] = field(default_factory=dict)
    host: tuple[Tensor, Sequence[int] | np.ndarray] | None = None

    def from_host(self) -> tuple[Tensor, Tensor]:
        """`host`, of which there is one, with the routes as a tensor: for faults and the guard, which seldom ask."""
        rows, routes = self.host or (torch.empty(0, dtype=torch.float32, device="cpu"), ())
        return rows, torch.as_tensor(routes, device="cpu")

    def at(self, routes: Tensor) -> Tensor:
        """Where the rows of these routes (on the CPU) are."""
        place = routes if self.place is None else torch.as_tensor(self.place, device="cpu")[routes].long().clamp(min=0)
        return place.to(self.rows.device)

    def rows_of(self, routes: Tensor) -> Tensor:
        return self.rows[self.at(routes)]

    def known_flags(self) -> Tensor:
        """The flags [T k] on the CPU; found out now, where no kernel has set them."""
        if self.flags is None:
            place = torch.arange(len(self.rows), device="cpu") if self.place is None else self.place
            place = torch.as_tensor(place, device="cpu")
            finite = torch.isfinite(self.rows_of(torch.arange(len(place), device="cpu"))).all(1).cpu()
            self.flags = (~finite & (place >= 0)).to(torch.uint8)
        return self.flags
