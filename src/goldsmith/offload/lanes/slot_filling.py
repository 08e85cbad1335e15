"""Filling of slots during a call: starts copies ahead of time, and yields experts in waves as they arrive.

The consumer calls slots.begin_reading and end_reading around each wave, before it requests the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..memory.cache import Cache
from ..memory.slots import Copy, Slot, SlotArena, SlotRing, fill, waves
from ..memory.streams import WorkStream
from ..observe.statistics import Counts
from ..planning.call import Call
from ..store.expert_store import ExpertStore

AHEAD = 16  # experts of a streamed layer per wave

Wave = list[tuple[int, Slot]]  # experts that are computed together, and the slots that hold or will hold them


class SlotFilling:
    """The waves of one call: copies run on `stream`, one wave ahead of the reader."""

    def __init__(self, call: Call, ring: SlotRing, stream: WorkStream, copy: Copy, *, keep: bool) -> None:
        assignment = call.assignment
        self.layer, self.assignment, self.cache = call.layer, assignment, call.cache
        self.ring, self.stream, self.copy = ring, stream, copy
        self.keep = keep  # copied experts may stay in the cache
        # for one token, launching a wave takes longer than its products: cached experts join the first copied wave
        self._joined = call.tokens == 1 and bool(assignment.copied)
        self._tally: Counts | None = None
        self._needed = frozenset((*assignment.cached, *assignment.copied, *assignment.cpu, *assignment.uploads))
        # as the call begins: experts admitted during the call are not read as cached
        self._cached = [e for e in assignment.cached if e in call.cache]
        self._absent = [e for e in assignment.cached if e not in call.cache]

    def waves(self, tally: Counts) -> Iterator[Wave]:
        self._tally, evictions = tally, self.cache.evictions
        try:
            yield from self._waves()
        finally:
            tally.evictions += self.cache.evictions - evictions

    def _waves(self) -> Iterator[Wave]:
        groups = list(waves(self.assignment.copied, self.ring.wave))
        ahead = self._fill(groups[0]) if groups else []
        cached = [(e, self.cache.slot(e)) for e in self._cached]
        if cached and not self._joined:
            yield cached
            cached = []
        for i in range(len(groups)):
            now, ahead = ahead, self._fill(groups[i + 1]) if i + 1 < len(groups) else []
            yield cached + now
            cached = []
        yield from self._forced(self._absent)
        self._upload()

    def _fill(self, experts: Sequence[int]) -> Wave:
        return self._filled([(e, self._kept(e) or self.ring.take()) for e in experts])

    def _kept(self, expert: int) -> Slot | None:
        slot = self.cache.admit(expert, self._needed) if self.keep else None
        self._uploaded(slot)
        return slot

    def _uploaded(self, slot: Slot | None) -> None:
        if slot is not None and self._tally is not None:
            self._tally.uploads += 1

    def _filled(self, wave: Wave) -> Wave:
        if wave:
            fill([slot for _, slot in wave], self.layer, [e for e, _ in wave], self.stream, self.copy)
        return wave

    def _forced(self, absent: list[int]) -> Iterator[Wave]:
        """Admits these experts to the cache even against its policy, in several waves if the slots are few."""
        while absent:
            wave: Wave = []
            for e in list(absent):
                slot = self.cache.force(e, {x for x, _ in wave})
                if slot is None:
                    break
                self._uploaded(slot)
                wave.append((e, slot))
                absent.remove(e)
            yield self._filled(wave)

    def _upload(self) -> None:
        for e in self.assignment.uploads:
            slot = self.cache.admit(e, self._needed)
            self._uploaded(slot)
            if slot is not None:
                self._filled([(e, slot)])


def following_layer(store: ExpertStore, caches: Mapping[int, Cache], layer: int) -> tuple[int, tuple[int, ...]] | None:
    """The next layer of the store, and its experts that are not in its cache."""
    later = [each for each in store.layers if each > layer]
    if not later:
        return None
    on_device = caches[later[0]].resident()
    return later[0], tuple(e for e in range(store.num_experts(later[0])) if e not in on_device)


class LayerStreaming:
    """Two arenas, each of which holds a whole layer at a time: slot e has expert e."""

    def __init__(self, arenas: Sequence[SlotArena]) -> None:
        self._arenas = list(arenas)
        self._holds: list[int | None] = [None] * len(arenas)

    def waves(self, call: Call, stream: WorkStream, copy: Copy) -> Iterator[Wave]:
        """The call's experts as they arrive; then the copies of the next layer begin."""
        assignment, following = call.assignment, call.following
        arena = self._at(call.layer)
        self._fill(arena, assignment.copied, stream, copy)
        if following is not None and following[0] not in self._holds:
            self._holds[1 - arena] = following[0]
            self._fill(1 - arena, following[1], stream, copy)
        if assignment.cached:
            yield [(e, call.cache.slot(e)) for e in assignment.cached]
        for group in waves(assignment.copied, AHEAD):
            yield [(e, self._arenas[arena].slots[e]) for e in group]
        self._holds[arena] = None

    def forget(self) -> None:
        """Forgets the contents of all slots, after a copy failed."""
        self._holds = [None] * len(self._arenas)
        for arena in self._arenas:
            for slot in arena.slots:
                slot.drop()

    def _at(self, layer: int) -> int:
        """The index of the arena that holds this layer or may take it; the other may already hold the next layer."""
        if layer not in self._holds:
            self._holds[self._holds.index(None) if None in self._holds else 0] = layer
        return self._holds.index(layer)

    def _fill(self, at: int, experts: Sequence[int], stream: WorkStream, copy: Copy) -> None:
        layer, slots = self._holds[at], self._arenas[at].slots
        for group in waves(experts, AHEAD):
            absent = [e for e in group if slots[e].owner != (layer, e)]
            if layer is not None and absent:
                fill([slots[e] for e in absent], layer, absent, stream, copy)
