"""Slots: places on the device for one expert each, filled and read again and again.

A slot is written after its last reader (`last_use`) and read after its writer (`ready`); only these events hand it
over. The memory is allocated once and never grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...experts import PackedExperts
from .streams import DONE, StreamEvent, WorkStream

Copy = Callable[[int, Sequence[int], Sequence[Tensor]], None]  # (layer, experts, their destinations)


@dataclass(eq=False)
class Slot:
    """Memory on the device for one expert.

    index: in the arena. generation: how often it was filled. owner: (layer, expert) that it holds or will hold.
    """

    index: int
    data: Tensor
    arena: SlotArena = field(repr=False)
    generation: int = 0
    owner: tuple[int, int] | None = None
    ready: StreamEvent = DONE
    last_use: StreamEvent = DONE

    def drop(self) -> None:
        self.owner = None


@dataclass(eq=False)
class SlotArena:
    """n slots in one allocation: `data` [n, stride] uint8, and the same bytes as PackedExperts of n experts for
    kernels.
    """

    data: Tensor
    base: PackedExperts
    slots: list[Slot] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [Slot(i, row, self) for i, row in enumerate(self.data)]

    def __len__(self) -> int:
        return len(self.slots)


def fill(slots: Sequence[Slot], layer: int, experts: Sequence[int], stream: WorkStream, copy: Copy) -> None:
    """Starts one copy of these experts into the slots on `stream`, after the slots' last readers; one event for all."""
    last: StreamEvent = DONE
    for slot, expert in zip(slots, experts, strict=True):
        slot.owner = (layer, expert)
        slot.generation += 1
        if slot.last_use is not last:
            last = slot.last_use
            stream.wait(last)
    into = [slot.data for slot in slots]
    stream.run(lambda: copy(layer, experts, into))
    ready = stream.record()
    for slot in slots:
        slot.ready = ready


def begin_reading(slots: Sequence[Slot], stream: WorkStream) -> None:
    """Makes `stream` wait for the writers of these slots."""
    last: StreamEvent = DONE
    for slot in slots:
        if slot.ready is not DONE:
            if slot.ready is not last:
                last = slot.ready
                stream.wait(last)
            slot.ready = DONE  # enough for this stream; a call on another stream waits for the call before it


def end_reading(slots: Sequence[Slot], stream: WorkStream, event: StreamEvent | None = None) -> None:
    """Marks the slots as read: the next writer waits for `event`, or for all work that `stream` has now."""
    event = stream.record() if event is None else event
    for slot in slots:
        slot.last_use = event


def waves(experts: Sequence[int], size: int) -> Iterator[list[int]]:
    """The experts in groups of at most `size`, in order."""
    for first in range(0, len(experts), size):
        yield list(experts[first : first + size])


class SlotRing:
    """Staging slots in rotation. Two halves: one is filled while the other is read."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots, self._next = list(slots), 0
        self.wave = max(1, len(self.slots) // 2)

    def take(self) -> Slot:
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        return slot
