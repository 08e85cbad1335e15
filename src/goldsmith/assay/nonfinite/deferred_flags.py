"""The asynchronous mode of a watch: flags stay on the device and are read together at the end of a step.

On the CPU nothing is asynchronous: there a flag is read at once, which costs less than to keep it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import events as facts
from .events import Event, Likely, Operand
from .interfaces import Observer
from .storage_history import FOREIGN, REPORTED, Place, StorageHistory, owner

EVIDENCE = "only flags were kept: watch with sync=True for the cause; if that finds nothing, suspect a race"


@dataclass(frozen=True)
class FlagRecord:
    """The result of one operator. meant: one of its inputs was an infinity that the program wrote itself."""

    op: str
    tensor: str
    total: int
    peak: float | Tensor
    inputs: tuple[tuple[Operand, float | Tensor, StorageHistory], ...]
    place: Place
    history: StorageHistory
    meant: bool


def flush(watch: Observer, notes: list[FlagRecord], history: Iterable[StorageHistory]) -> None:
    """Read all flags at once, then judge the records in order."""
    history = list(history)
    entries = [*history, *(entry for note in notes for _, _, entry in note.inputs)]
    waiting: list[object] = [p for note in notes for p in (note.peak, *(peak for _, peak, _ in note.inputs))]
    waiting += [p for entry in entries for p in (entry.peak, entry.mask)]
    values = read_all({id(p): p for p in waiting if isinstance(p, Tensor)})
    for entry in entries:
        if entry.mask is not None:
            entry.meant |= bool(values[id(entry.mask)])
            entry.mask = None
    try:
        for note in notes:
            _judge(watch, note, values)
    finally:
        for entry in history:
            if isinstance(entry.peak, Tensor):
                entry.peak = values[id(entry.peak)]


def _judge(watch: Observer, note: FlagRecord, values: dict[int, float]) -> None:
    if note.history.under is not None:
        note.history.reported |= note.history.under.reported
        note.history.meant |= note.history.under.meant
        note.history.under = None
    value = values[id(note.peak)] if isinstance(note.peak, Tensor) else note.peak
    if math.isfinite(value):
        return
    inputs = [(o, values[id(p)] if isinstance(p, Tensor) else p, entry) for o, p, entry in note.inputs]
    guilty = [(operand, entry, owner(entry, peak)) for operand, peak, entry in inputs if not math.isfinite(peak)]
    unseen = [(operand, entry) for operand, entry, whose in guilty if whose == FOREIGN]
    carried = not unseen and any(whose == REPORTED for _, _, whose in guilty)
    if not unseen and not carried and math.isinf(value) and (guilty or note.meant):
        note.history.meant = True
        return
    note.history.reported = True
    if carried:
        return
    for _, entry in unseen:
        entry.reported = True
    where = note.place
    watch.report(
        Event(
            facts.kind_of(value), where.phase, where.module, note.op, note.tensor, None, note.total, None,
            tuple(Operand(o.shape, o.dtype, peak, o.source) for o, peak, _ in inputs), not unseen,
            unseen[0][0].source if unseen else note.op, where.step, facts.frame_texts(where.stack),
            Likely("unknown", EVIDENCE),
        )
    )  # fmt: skip


def read_all(tensors: dict[int, Tensor]) -> dict[int, float]:
    """Scalars on any devices as numbers, with one transfer for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for key, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(key)
    values: dict[int, float] = {}
    for keys in groups.values():
        values.update(zip(keys, torch.stack([tensors[k] for k in keys]).tolist(), strict=True))
    return values
