"""Filling of slots during a call: starts copies ahead of time, and yields experts in waves as they arrive.

The consumer calls slots.begin_reading and end_reading around each wave, before it requests the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..memory.slots import Arena, Copy, Ring, Slot, fill, waves
from ..memory.streams import Stream
from ..observe.statistics import Counts
from ..planning.call import Call

AHEAD = 16  # experts of a streamed layer per wave

Wave = list[tuple[int, Slot]]  # experts that are computed together, and the slots that hold or will hold them


class Filling:
    """The waves of one call: copies run on `stream`, one wave ahead of the reader."""

    def __init__(self, call: Call, ring: Ring, stream: Stream, copy: Copy, *, keep: bool) -> None:
        given = call.assignment
        self.layer, self.given, self.cache = call.layer, given, call.cache
        self.ring, self.stream, self.copy = ring, stream, copy
        self.keep = keep  # copied experts may stay in the cache
        # for one token, launching a wave takes longer than its products: cached experts join the first copied wave
        self._joined = call.tokens == 1 and bool(given.copied)
        self._tally: Counts | None = None
        self._needed = frozenset((*given.cached, *given.copied, *given.cpu, *given.uploads))
        # as the call begins: experts admitted during the call are not read as cached
        self._held = [e for e in given.cached if e in call.cache]
        self._absent = [e for e in given.cached if e not in call.cache]

    def waves(self, tally: Counts) -> Iterator[Wave]:
        self._tally, evictions = tally, self.cache.evictions
        try:
            yield from self._waves()
        finally:
            tally.evictions += self.cache.evictions - evictions

    def _waves(self) -> Iterator[Wave]:
        groups = list(waves(self.given.copied, self.ring.wave))
        ahead = self._fill(groups[0]) if groups else []
        there = [(e, self.cache.slot(e)) for e in self._held]
        if there and not self._joined:
            yield there
            there = []
        for i in range(len(groups)):
            now, ahead = ahead, self._fill(groups[i + 1]) if i + 1 < len(groups) else []
            yield there + now
            there = []
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
        for e in self.given.uploads:
            slot = self.cache.admit(e, self._needed)
            self._uploaded(slot)
            if slot is not None:
                self._filled([(e, slot)])


class Streaming:
    """Two arenas, each of which holds a whole layer at a time: slot e has expert e."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = list(arenas)
        self._holds: list[int | None] = [None] * len(arenas)

    def waves(self, call: Call, stream: Stream, copy: Copy) -> Iterator[Wave]:
        """The call's experts as they arrive; then the copies of the next layer begin."""
        given, following = call.assignment, call.following
        at = self._at(call.layer)
        self._fill(at, given.copied, stream, copy)
        if following is not None and following[0] not in self._holds:
            self._holds[1 - at] = following[0]
            self._fill(1 - at, following[1], stream, copy)
        if given.cached:
            yield [(e, call.cache.slot(e)) for e in given.cached]
        for group in waves(given.copied, AHEAD):
            yield [(e, self._arenas[at].slots[e]) for e in group]
        self._holds[at] = None

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

    def _fill(self, at: int, experts: Sequence[int], stream: Stream, copy: Copy) -> None:
        layer, slots = self._holds[at], self._arenas[at].slots
        for group in waves(experts, AHEAD):
            absent = [e for e in group if slots[e].owner != (layer, e)]
            if layer is not None and absent:
                fill([slots[e] for e in absent], layer, absent, stream, copy)
