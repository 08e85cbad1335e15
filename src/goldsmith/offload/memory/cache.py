"""The cache: the experts of a layer that stay on the device, and the choice of which one to evict.

An expert counts as cached from the call after its upload began, whether or not the copy has arrived: the kernel waits
for it. So the contents depend only on the calls, and the results stay reproducible bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress

from .slots import Slot

DECAY = 0.9  # of lfu's counts per call: a use ten calls ago weighs a third


class Cache:
    """A layer's slots and the experts in them. policy: lru, lfu, static (only the `chosen` experts), none."""

    def __init__(self, policy: str, slots: Sequence[Slot], experts: int, chosen: Sequence[int] = ()) -> None:
        self.policy = policy
        self._free = list(reversed(slots))
        self._slot_of: dict[int, Slot] = {}
        self._used: dict[int, float] = {}  # lru: the last call that used it; lfu: its decayed use count
        self._call = 0
        self._chosen = frozenset(chosen[: len(slots)])
        self.capacity = len(slots)
        self.evictions = 0
        self.profile = [0] * experts  # calls that used each expert

    @property
    def holds(self) -> int:
        """The number of cached experts."""
        return len(self._slot_of)

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot_of

    def resident(self) -> frozenset[int]:
        return frozenset(self._slot_of)

    def slot(self, expert: int) -> Slot:
        return self._slot_of[expert]

    def slots(self) -> list[Slot]:
        return [*self._free, *self._slot_of.values()]

    def used(self, counts: Mapping[int, int]) -> None:
        """Records the experts of a call ({expert: tokens}), whichever lane computes them."""
        self._call += 1
        for expert in counts:
            self.profile[expert] += 1
        if self.policy == "lru":
            self._used.update(dict.fromkeys(counts, float(self._call)))
        elif self.policy == "lfu":
            self._used = {e: n * DECAY for e, n in self._used.items() if n > 1e-6}
            for expert in counts:
                self._used[expert] = self._used.get(expert, 0.0) + 1.0

    def add_uses(self, uses: Sequence[int]) -> None:
        """Adds calls that used each expert to the profile; for calls that no device lane sees."""
        self.profile = [a + b for a, b in zip(self.profile, uses)]

    def admit(self, expert: int, needed: Collection[int]) -> Slot | None:
        """A slot for an expert that is not cached, after evicting one that is not `needed`; None if none may be
        evicted.

        lfu: an expert does not evict one that is used more often. static: admits only the chosen experts.
        """
        if self.policy == "none" or (self.policy == "static" and expert not in self._chosen):
            return None
        return self._take(expert, needed, forced=False)

    def force(self, expert: int, needed: Collection[int]) -> Slot | None:
        """A slot regardless of the policy: for lanes="cached", where the expert must be cached."""
        return self._take(expert, needed, forced=True)

    def forget(self, expert: int) -> None:
        """Frees the slot of an expert whose upload failed."""
        slot = self._slot_of.pop(expert, None)
        if slot is not None:
            slot.drop()
            self._free.append(slot)

    def close(self) -> None:
        """Gives up all slots; the counts stay."""
        self._free, self._slot_of = [], {}

    def clear(self) -> None:
        for expert in list(self._slot_of):
            self.forget(expert)

    def _take(self, expert: int, needed: Collection[int], *, forced: bool) -> Slot | None:
        slot = self._free.pop() if self._free else self._evicted(expert, needed, forced)
        if slot is not None:
            self._slot_of[expert] = slot
        return slot

    def _evicted(self, expert: int, needed: Collection[int], forced: bool) -> Slot | None:
        if self.policy == "static" and not forced:
            return None
        victim = min(
            (e for e in self._slot_of if e not in needed), key=lambda e: (self._used.get(e, 0.0), e), default=None
        )
        if victim is None:
            return None
        if self.policy == "lfu" and not forced and self._used.get(victim, 0.0) >= self._used.get(expert, 0.0):
            return None
        slot = self._slot_of.pop(victim)
        slot.drop()
        self.evictions += 1
        return slot

    def to_dict(self) -> dict[str, object]:
        return {"policy": self.policy, "slots": self.capacity, "held": sorted(self._slot_of)}


def counts_of(counts: Sequence[int]) -> dict[int, int]:
    """{expert: tokens} of the experts with tokens."""
    return {e: counts[e] for e in compress(range(len(counts)), counts)}


def most_used_first(experts: Iterable[int], counts: Sequence[int]) -> list[int]:
    return sorted(experts, key=lambda e: (-counts[e], e))
