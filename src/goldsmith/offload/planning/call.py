"""The record of one call: inputs, assignment and results. The guard keeps it until it has read the flags."""

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
    """One call: x [T, H] as the lanes take it (`caller_x` is the caller's), ids [T, k] on the CPU, -1 for a skipped
    route, and weights [T, k], 0 for a skipped route, on the engine's device (float32, or on a GPU the caller's dtype).
    """

    layer: int
    number: int
    caller_x: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor
    counts: list[int]
    assignment: Assignment
    cache: Cache
    tally: Counts
    first_row: int = 0  # offset in the caller's tokens, if the call is one piece of several
    positions: int = 0  # positions per sequence in the caller's tokens, if known; otherwise 0
    following: tuple[int, tuple[int, ...]] | None = None  # the next layer, and its experts that are not in its cache

    def count(self) -> None:
        """Adds the call's experts and its prediction to its tally."""
        tally, assignment = self.tally, self.assignment
        tally.experts_cpu += len(assignment.cpu)
        tally.experts_copied += len(assignment.copied)
        tally.experts_cached += len(assignment.cached)
        if assignment.predicted is not None:
            tally.expect(assignment.predicted, assignment.limiting or "none")

    @property
    def routes(self) -> int:
        return self.ids.numel()

    @property
    def tokens(self) -> int:
        return self.x.shape[0]


@dataclass(eq=False)
class Outcome:
    """The results: rows [*, H] float32, out [T, H] in the caller's dtype, flags [T k]: 0, 1 not finite, 255 never
    written

    flags   None if no kernel sets them
    place   the row of each route, -1 if it is skipped; None: rows are in the order of the routes
    slots   the slot from which a device lane read an expert, and its generation then
    host    the CPU lane's rows before their copy to the device, and their routes
    """

    rows: Tensor
    flags: Tensor | None
    out: Tensor
    place: Tensor | np.ndarray | list[int] | None = None
    slots: dict[int, tuple[Slot, int]] = field(default_factory=dict)
    host: tuple[Tensor, Sequence[int] | np.ndarray] | None = None

    def from_host(self) -> tuple[Tensor, Tensor]:
        """`host`, with the routes as a tensor (empty if there are none). Only faults and the guard use it."""
        rows, routes = self.host or (torch.empty(0, dtype=torch.float32, device="cpu"), ())
        return rows, torch.as_tensor(routes, device="cpu")

    def at(self, routes: Tensor) -> Tensor:
        """The row numbers of these routes (on the CPU)."""
        place = routes if self.place is None else torch.as_tensor(self.place, device="cpu")[routes].long().clamp(min=0)
        return place.to(self.rows.device)

    def rows_of(self, routes: Tensor) -> Tensor:
        return self.rows[self.at(routes)]

    def known_flags(self) -> Tensor:
        """The flags [T k] on the CPU; computed now if no kernel has set them."""
        if self.flags is None:
            place = torch.arange(len(self.rows), device="cpu") if self.place is None else self.place
            place = torch.as_tensor(place, device="cpu")
            finite = torch.isfinite(self.rows_of(torch.arange(len(place), device="cpu"))).all(1).cpu()
            self.flags = (~finite & (place >= 0)).to(torch.uint8)
        return self.flags
