"""The ear of a watch: every operator under a dispatch mode, one reduction (max |x|) for every tensor that it makes.

What was learned of a tensor is kept by its storage, so that views, optimizers and the backward find it again. Memory
that `empty` returned may hold NaN legitimately: it is judged when it is first read. An infinity that the program wrote
down itself (a mask of -inf) is no event, nor are the infinities that come of it; a NaN that comes of it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from . import watch_facts as facts
from .memory import _EMPTY
from .watch_facts import Event, Frames, Likely, Operand

if TYPE_CHECKING:
    from .watch import Watch

PURE_WRITERS = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_"}
UNSAID = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
PURGE = 1 << 14  # storages, after which dead ones are forgotten
FLUSH = 1 << 16  # operators, after which on-device flags are read although the step goes on
BACKWARD, FORWARD = "backward", "forward"


@dataclass
class Known:
    """What is known of a storage.

    writer  the operator that wrote it last, "" for what came from outside
    name    what a user calls it, where it came from outside
    peak    max |x|; on the device until it is read, where nothing may wait
    fresh   made by `empty` and not judged yet
    meant   holds infinities that the program wrote down
    told    holds what an event has told of
    """

    ref: StorageWeakRef
    writer: str
    peak: float | Tensor = 0.0
    fresh: bool = False
    meant: bool = False
    told: bool = False
    name: str = ""


@dataclass(frozen=True)
class Plan:
    """How an operator is heard: `writes` are the arguments that it changes, `reads` whether it reads them as well."""

    skip: bool
    empty: bool
    name: str
    writes: tuple[int | str, ...]
    reads: bool
    many: bool  # lists of tensors go in and come out: result i is made of the i-th of every list
    unsaid: tuple[int, ...]  # arguments that it changes although its schema does not say so


def plan_of(func: Any) -> Plan:
    schema = func._schema
    stem = schema.name.split("::")[1]
    writes: list[int | str] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else place)
    view = not writes and any(r.alias_info is not None for r in schema.returns)
    reads = bool(writes) and stem not in PURE_WRITERS and not any(isinstance(w, str) for w in writes)
    many = stem.startswith(("_foreach", "_fused"))
    return Plan(view, func in _EMPTY, schema.name, tuple(writes), reads, many, UNSAID.get(stem, ()))


@dataclass(frozen=True)
class Note:
    """One operator's result in the mode that reads flags at the end."""

    op: str
    tensor: str
    total: int
    peak: Tensor
    inputs: tuple[tuple[Operand, float | Tensor, Known | None], ...]
    place: Place
    shape: tuple[int, ...]
    known: Known
    meant: bool


@dataclass(frozen=True)
class Place:
    """Where in the program: the phase, the innermost module, the step, the user frames."""

    phase: str
    module: str
    step: int
    stack: Frames


class Ear(TorchDispatchMode):
    """Hears every operator for a watch."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch
        self.known: dict[int, Known] = {}
        self.plans: dict[Any, Plan] = {}
        self.notes: list[Note] = []
        self.fresh = 0
        self.last = "the start"
        self.purge_at = PURGE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watch.listening:
            return func(*args, **kwargs)
        self.watch.remember()
        plan = self.plans.get(func)
        if plan is None:
            plan = self.plans[func] = plan_of(func)
        if plan.skip:
            return func(*args, **kwargs)
        with torch.no_grad():
            return self._hear(func, plan, args, kwargs)

    def _hear(self, func: Callable, plan: Plan, args: Any, kwargs: Any) -> Any:
        if plan.empty:
            return self._empty(func(*args, **kwargs), plan.name)
        written = [t for w in plan.writes for t in facts.leaves(kwargs.get(w) if isinstance(w, str) else _at(args, w))]
        read = [t for t in facts.leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not plan.reads:
            read = [t for t in read if not any(t is w for w in written)]
        read = [t for t in read if facts.plain(t)]
        if self.fresh:
            self._judge_fresh(read, plan.name)
        before: dict[int, float | Tensor] = {}
        if not self.watch.sync or plan.reads or plan.unsaid:  # afterwards they are overwritten
            before = {id(t): self._peak(t) for t in read}
        out = func(*args, **kwargs)
        made = written or list(facts.leaves(out))
        lists = [a for a in args if isinstance(a, list | tuple) and len(a) == len(made) > 1]
        for number, tensor in enumerate(made):
            if facts.plain(tensor):
                label = "what it changed" if written else f"result {number}" if len(made) > 1 else "its result"
                of = [a[number] for a in lists if facts.plain(a[number])] if plan.many else read
                self._judge(func, plan, args, kwargs, tensor, label, of, before)
        for tensor in (_at(args, place) for place in plan.unsaid):
            if facts.plain(tensor):
                self._judge(func, plan, args, kwargs, tensor, "what it changed", read, before)
        self.last = plan.name
        return out

    # memory

    def entry(self, tensor: Tensor) -> Known | None:
        return self.known.get(tensor.untyped_storage()._cdata)

    def _record(
        self, tensor: Tensor, writer: str, peak: float | Tensor, *, meant: bool = False, told: bool = False
    ) -> Known:
        storage = tensor.untyped_storage()
        before = self.known.get(storage._cdata)
        part = tensor.numel() * tensor.element_size() < storage.nbytes()
        if before is not None and before.fresh and part:
            return before  # the rest of it has not been written yet
        if before is not None and before.fresh:
            self.fresh -= 1
        if before is not None and before.told and part:
            told = True
        self.known[storage._cdata] = known = Known(StorageWeakRef(storage), writer, peak, meant=meant, told=told)
        if len(self.known) > self.purge_at:
            self.known = {k: v for k, v in self.known.items() if not v.ref.expired()}
            self.fresh = sum(v.fresh for v in self.known.values())
            self.purge_at = max(PURGE, 2 * len(self.known))
        return known

    def _empty(self, tensor: Tensor, name: str) -> Tensor:
        if facts.plain(tensor):
            self.fresh += 1
            storage = tensor.untyped_storage()
            self.known[storage._cdata] = Known(StorageWeakRef(storage), name, fresh=True)
        return tensor

    def _peak(self, tensor: Tensor) -> float | Tensor:
        """max |x| of what an operator is about to read; nothing is reduced twice that nobody wrote in between."""
        known = self.entry(tensor)
        if known is not None and not known.fresh:
            return known.peak
        name = self.watch.source(tensor)
        peak = facts.peak(tensor) if self.watch.sync else facts.absmax(tensor)
        self._record(tensor, "", peak).name = name
        return peak

    def _judge_fresh(self, read: list[Tensor], op: str) -> None:
        """What `empty` returned is read for the first time."""
        for tensor in read:
            known = self.entry(tensor)
            if known is None or not known.fresh:
                continue
            peak = facts.peak(tensor)
            if math.isfinite(peak):
                self._record(tensor, known.writer, peak)
                continue
            known.fresh = False
            self.fresh -= 1
            what = "uninitialised_accumulator" if op.endswith("_") else "never_written"
            evidence = f"memory of {known.writer} is read by {op}, and no operator has written these elements"
            source = f"written between {known.writer} and {op}, or never"
            self._tell(tensor, "what it read", op, peak, [tensor], [peak], False, source, Likely(what, evidence))
            known.told, known.peak = True, peak

    # judging

    def _judge(
        self, func: Callable, plan: Plan, args: Any, kwargs: Any, out: Tensor, label: str, read: list[Tensor],
        before: dict[int, float | Tensor],
    ) -> None:  # fmt: skip
        if self.watch.sync:
            value = facts.peak(out)
            if math.isfinite(value):
                self._record(out, plan.name, value)
                return
        meant = any(isinstance(v, float) and not math.isfinite(v) for v in facts.leaves((args, kwargs)))
        if not self.watch.sync:
            peak = facts.absmax(out)
            operands = tuple((self._operand(t, 0.0), before[id(t)], self.entry(t)) for t in read if id(t) in before)
            known = self._record(out, plan.name, peak)
            place = self.watch.place()
            self.notes.append(
                Note(plan.name, label, out.numel(), peak, operands, place, tuple(out.shape), known, meant)
            )
            if len(self.notes) >= FLUSH:
                self.flush()
            return
        peaks = [float(before[id(t)]) if id(t) in before else facts.peak(t) for t in read]
        entries = [self.entry(t) for t in read]
        guilty = [i for i, p in enumerate(peaks) if not math.isfinite(p)]
        kind = facts.kind_of(value)
        on_purpose = meant or any(e is not None and e.meant for e in entries)
        if kind == facts.INF and on_purpose:
            self._record(out, plan.name, value, meant=True)
            return
        unseen = [i for i in guilty if (e := entries[i]) is None or not (e.told or e.meant)]
        if guilty and not unseen and any((e := entries[i]) is not None and e.told for i in guilty):
            self._record(out, plan.name, value, told=True)
            return
        if unseen:
            first = unseen[0]
            entry = entries[first]
            source, likely = self._entered(read[first], entry, plan.name)
            if entry is None:
                entry = self._record(read[first], "", peaks[first])
                entry.name = source
            entry.told = True
            self._tell(out, label, plan.name, value, read, peaks, False, source, likely)
        else:
            likely = facts.cause(plan.name, func, args, kwargs, out, kind, bool(plan.writes))
            self._tell(out, label, plan.name, value, read, peaks, True, plan.name, likely)
        self._record(out, plan.name, value, told=True)

    def _entered(self, tensor: Tensor, known: Known | None, op: str) -> tuple[str, Likely]:
        """Whence a value came that is not finite and that no operator was seen to make."""
        name = self.watch.source(tensor)
        facts.settle()
        if math.isfinite(facts.peak(tensor)):
            evidence = f"{name} was not finite when {op} read it, and is after a synchronisation: it was not ready"
            return name, Likely("missing_sync", evidence)
        if known is not None and known.writer and isinstance(known.peak, float) and math.isfinite(known.peak):
            between = f"written between {known.writer} and {op}"
            return between, Likely("unknown", f"{between}, outside of torch's operators: a kernel of its own wrote it")
        return name, Likely("unknown", f"{name} was not finite when {op} read it")

    def _tell(
        self, tensor: Tensor, label: str, op: str, peak: float, read: list[Tensor], peaks: list[float], born: bool,
        source: str, likely: Likely,
    ) -> None:  # fmt: skip
        facts.settle()
        count, index = facts.where(tensor)
        if count == 0:
            evidence = f"read again after a synchronisation, {label} of {op} is finite: it was read before it was ready"
            likely = Likely("missing_sync", evidence)
        place = self.watch.place()
        operands = tuple(self._operand(t, p) for t, p in zip(read, peaks, strict=True))
        self.watch.tell(
            Event(
                facts.kind_of(peak), place.phase, place.module, op, label, count, tensor.numel(), index, operands, born,
                source, place.step, facts.said(place.stack), likely,
            )
        )  # fmt: skip

    def _operand(self, tensor: Tensor, peak: float) -> Operand:
        return Operand(tuple(tensor.shape), facts.name_of(tensor.dtype), peak, self.watch.source(tensor))

    # flags that are read at the end

    def flush(self) -> None:
        """Read all flags of the notes at once, then judge the notes in order."""
        notes, self.notes = self.notes, []
        tensors = {id(p): p for n in notes for p in (n.peak, *(i[1] for i in n.inputs)) if isinstance(p, Tensor)}
        values = read_all(tensors)
        told: set[int] = set()
        meant: set[int] = set()
        for note in notes:
            value = values[id(note.peak)]
            if math.isfinite(value):
                continue
            inputs = [(o, values[id(p)] if isinstance(p, Tensor) else p, id(p), e) for o, p, e in note.inputs]
            guilty = [i for i in inputs if not math.isfinite(i[1])]
            kind = facts.kind_of(value)
            if kind == facts.INF and (note.meant or any(i[2] in meant or (i[3] and i[3].meant) for i in guilty)):
                meant.add(id(note.peak))
                note.known.meant = True
                continue
            unseen = [i for i in guilty if i[2] not in told | meant and not (i[3] and (i[3].told or i[3].meant))]
            told.add(id(note.peak))
            note.known.told = True
            if guilty and not unseen and any(i[2] in told or (i[3] and i[3].told) for i in guilty):
                continue
            source = unseen[0][0].source if unseen else note.op
            for _, _, flag, entry in unseen:
                told.add(flag)
                if entry is not None:
                    entry.told = True
            evidence = "flags alone were kept: watch with sync=True for the cause; what only flags see, a race may be"
            operands = tuple(Operand(o.shape, o.dtype, p, o.source) for o, p, _, _ in inputs)
            where = note.place
            self.watch.tell(
                Event(
                    kind, where.phase, where.module, note.op, note.tensor, None, note.total, None, operands, not unseen,
                    source, where.step, facts.said(where.stack), Likely("unknown", evidence),
                )
            )  # fmt: skip
        for entry in self.known.values():
            if isinstance(entry.peak, Tensor):
                entry.peak = values.get(id(entry.peak), 0.0)


def _at(args: Any, place: int | str) -> Any:
    return args[place] if isinstance(place, int) and place < len(args) else ()


def read_all(tensors: dict[int, Tensor]) -> dict[int, float]:
    """Scalars of every device as numbers, with one transfer for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for key, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(key)
    values: dict[int, float] = {}
    for keys in groups.values():
        values.update(zip(keys, torch.stack([tensors[k] for k in keys]).tolist(), strict=True))
    return values
