"""Which experts are on the device during a recorded step, and which ones come next: a pure function of the calls.

Between two steps the table may change: an expert that was used again and again replaces one that was not. Its copy
runs beside the next step, and the step after that reads it. Copies get a share of the link: as many bytes as it can
carry in a quarter of the time that the CPU spends on experts, so a cold cache costs little and fills while text is
generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..memory.cache import Cache
from ..memory.slots import Slot
from ..planning.costs import Costs

SHARE = 0.25  # of the CPU's time, in which the link copies experts
EVERY = 8  # a layer's uses are read after so many steps: 10 us each
_MOST = 4.0  # copies that may be saved up
AGAIN = 2  # uses since the layer was read last, after which an expert is worth a copy


@dataclass
class Residency:
    """The slots of all layers as a table [L, E] (-1: none), which the device reads in a step.

    layers   the store's layers, in the order of the table
    """

    layers: Sequence[int]
    caches: Mapping[int, Cache]
    table: np.ndarray
    costs: Costs | None
    credit: float = 0.0
    # copies (layer's row, expert, slot) that began after the last step, and after the one before
    begun: list[tuple[int, int, Slot]] = field(default_factory=list)
    coming: list[tuple[int, int, Slot]] = field(default_factory=list)
    _seen: np.ndarray = field(init=False)
    _turn: int = field(init=False, default=0)
    _seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self._seen = np.zeros(self.table.shape, dtype=np.int64)
        self._seconds = 0.0 if self.costs is None else float(np.interp(1.0, *self.costs.cpu))  # of a route on the CPU

    def read(self) -> list[Slot]:
        """Sets the table to what the caches hold now, and returns these slots."""
        self.table.fill(-1)
        self.begun, self.coming = [], []
        slots = []
        for row, layer in enumerate(self.layers):
            cache = self.caches[layer]
            for expert in cache.resident():
                slot = cache.slot(expert)
                self.table[row, expert] = slot.index
                slots.append(slot)
        return slots

    def advance(self) -> list[Slot] | None:
        """Before a step: puts the experts into the table whose copies ran beside the step before; returns their slots.

        None if the table is as it was in the step before.
        """
        arrived, self.coming, self.begun = self.coming, self.begun, []
        for row, expert, slot in arrived:
            if slot.owner == (self.layers[row], expert):  # it may have been evicted again
                self.table[row, expert] = slot.index
        return [slot for _, _, slot in arrived] if arrived or self.coming else None

    def choose(self, uses: np.ndarray, on_cpu: int) -> list[tuple[int, int, Slot]]:
        """The copies to begin after a step: rows of the table, experts, and their slots, which are free now

        uses     [L, E]: routes of each expert so far
        on_cpu   routes that the CPU computed in this step
        """
        if self.costs is None:
            return []
        copies = SHARE * on_cpu * self._seconds * self.costs.link_bytes_per_s / self.costs.expert_bytes
        self.credit = min(_MOST, self.credit + copies)
        self._turn = (self._turn + 1) % EVERY
        visited = slice(self._turn, len(self.layers), EVERY)
        recent = uses[visited] - self._seen[visited]
        self._seen[visited] = uses[visited]
        used, at = np.nonzero(recent)[1].tolist(), 0
        for i, count in enumerate(np.count_nonzero(recent, axis=1).tolist()):
            if count:
                self._visit(self._turn + i * EVERY, used[at : at + count], recent[i])
            at += count
        return self.begun

    def _visit(self, row: int, used: list[int], recent: np.ndarray) -> None:
        layer = self.layers[row]
        cache = self.caches[layer]
        cache.used(dict.fromkeys(used, 1))
        if self.credit < 1.0:
            return
        missing = [e for e in np.flatnonzero(recent >= AGAIN).tolist() if e not in cache]
        for expert in sorted(missing, key=lambda e: (-recent[e], e)):
            if self.credit < 1.0:
                return
            before = cache.resident()
            slot = cache.admit(expert, used)
            if slot is None:
                return
            self.credit -= 1.0
            for gone in before - cache.resident():
                self.table[row, gone] = -1
            self.begun.append((row, expert, slot))
