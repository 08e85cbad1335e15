"""The dispatch mode of a watch: sees every operator, and reduces each tensor that it creates once (max |x|).

It remembers facts about a tensor by its storage, so that views, optimizers and the backward find them. Memory from
`empty` may legitimately hold NaN, and is judged when it is first read. An infinity that the program wrote itself (a
mask of -inf) is not an event, and neither are infinities that result from it. A NaN that results from it is an event,
and so is one that an operator creates from finite numbers beside it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..support.dispatch_mode import DispatchMode
from . import deferred_flags as flags
from . import events as facts
from .deferred_flags import FlagRecord
from .events import Event, Likely, Operand
from .interfaces import Observer
from .mode_stacks import DispatchStack, SleepingMode
from .storage_history import FOREIGN, REPORTED, OperatorEffects, StorageHistory, effects_of, owner

PURGE = 1 << 14  # after this many storages, dead ones are forgotten
FLUSH = 1 << 16  # after this many operators, on-device flags are read even in the middle of a step
A_CONSTANT = "a constant"


class _Aside(threading.local):
    """Whether a watch is computing for itself, which an outer watch must ignore."""

    on = False


_aside = _Aside()


class WatchMode(SleepingMode, DispatchMode):
    """The dispatch mode: sees every operator, and reports events to its watch."""

    stack = DispatchStack

    def __init__(self, watch: Observer):
        super().__init__()
        self.watch = watch
        self.history: dict[int, StorageHistory] = {}
        self.effects: dict[object, OperatorEffects] = {}
        self.notes: list[FlagRecord] = []
        self.fresh = 0
        self.last = "the start"
        self.purge_at = PURGE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watch.listening or _aside.on:
            return func(*args, **kwargs)
        self.watch.remember()
        effects = self.effects.get(func)
        if effects is None:
            effects = self.effects[func] = effects_of(func)
        if effects.skip and not effects.constant:
            return func(*args, **kwargs)
        _aside.on = True
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes 5 times as long, and this runs for every operator
        try:
            return self._run_watched(func, effects, args, kwargs)
        finally:
            torch._C._set_grad_enabled(grad)
            _aside.on = False

    def _run_watched(self, func: Callable, effects: OperatorEffects, args: Any, kwargs: Any) -> Any:
        if effects.constant:
            return self._constant(_run(func, args, kwargs))
        if effects.empty:
            return self._empty(_run(func, args, kwargs), effects.name)
        written = [
            t for w in effects.writes for t in facts.leaves(kwargs.get(w) if isinstance(w, str) else _at(args, w))
        ]
        read = [t for t in facts.leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not effects.reads:
            read = [t for t in read if not any(t is w for w in written)]
        read = [t for t in read if facts.plain(t)]
        if self.fresh:
            self._judge_fresh(read, effects.name)
        before: dict[int, float | Tensor] = {}
        if effects.reads or effects.undeclared or not self.watch.sync and not all(t.is_cpu for t in read):
            # the operator overwrites these, or will have by the time that the flags are read
            before = {id(t): self._peak(t) for t in read}
        out = _run(func, args, kwargs)
        results = written or facts.leaves(out)
        lists = [a for a in args if isinstance(a, list | tuple) and len(a) == len(results) > 1]
        for number, tensor in enumerate(results):
            if facts.plain(tensor):
                label = "what it changed" if written else f"result {number}" if len(results) > 1 else "its result"
                of = [a[number] for a in lists if facts.plain(a[number])] if effects.many else read
                self._judge(func, effects, args, kwargs, tensor, label, of, before)
        for tensor in (_at(args, place) for place in effects.undeclared):
            if facts.plain(tensor):
                self._judge(func, effects, args, kwargs, tensor, "what it changed", read, before)
        self.last = effects.name
        return out

    # memory

    def entry(self, tensor: Tensor) -> StorageHistory | None:
        return self.history.get(tensor.untyped_storage()._cdata)

    def record(
        self, tensor: Tensor, writer: str, peak: float | Tensor, *, meant: bool = False, reported: bool = False
    ) -> StorageHistory:
        storage = tensor.untyped_storage()
        before = self.history.get(storage._cdata)
        part = before is not None and tensor.numel() * tensor.element_size() < storage.nbytes()
        if before is not None and before.fresh and part:
            before.meant |= meant
            return before  # the rest of it has not been written yet
        if before is not None and before.fresh:
            self.fresh -= 1
        self.history[storage._cdata] = history = StorageHistory(
            StorageWeakRef(storage), writer, peak, meant=meant, reported=reported
        )
        if before is not None and part:
            history.part_of(before)
            history.under = None if self.watch.sync else before
        if len(self.history) > self.purge_at:
            self.history = {k: v for k, v in self.history.items() if not v.ref.expired()}
            self.fresh = sum(v.fresh for v in self.history.values())
            self.purge_at = max(PURGE, 2 * len(self.history))
        return history

    def forget(self, tensor: Tensor) -> None:
        """Something that the mode has not seen may have written this tensor. Events about it stay known."""
        history = self.entry(tensor)
        if (
            history is not None
            and not history.fresh
            and not isinstance(history.peak, Tensor)
            and math.isfinite(history.peak)
        ):
            del self.history[tensor.untyped_storage()._cdata]

    def _empty(self, tensor: Tensor, name: str) -> Tensor:
        if facts.plain(tensor):
            self.fresh += 1
            storage = tensor.untyped_storage()
            self.history[storage._cdata] = StorageHistory(StorageWeakRef(storage), name, fresh=True)
        return tensor

    def _constant(self, tensor: Tensor) -> Tensor:
        """A constant of the program: `torch.tensor(...)`, or the number in `mask[index] = -math.inf`."""
        if facts.plain(tensor) and tensor.untyped_storage().resizable():  # otherwise numpy owns the memory: an input
            self.record(tensor, "", self._measured(tensor), meant=True).name = A_CONSTANT
        return tensor

    def _peak(self, tensor: Tensor) -> float | Tensor:
        """max |x| of a tensor that an operator is about to read; reduced again only if it was written in between."""
        history = self.entry(tensor)
        if history is not None and not history.fresh:
            if (
                isinstance(history.peak, Tensor)
                or math.isfinite(history.peak)
                or not (self.watch.sync or tensor.is_cpu)
            ):
                return history.peak
            return facts.peak(tensor)  # it may be a finite part of a tensor that is not finite
        return self._outside(tensor, self._measured(tensor)).peak

    def _measured(self, tensor: Tensor) -> float | Tensor:
        """max |x| as a number, or as a tensor on a GPU with sync=False, where reading it would cost a wait."""
        return facts.peak(tensor) if self.watch.sync or tensor.is_cpu else facts.absmax(tensor)

    def _outside(self, tensor: Tensor, peak: float | Tensor) -> StorageHistory:
        """Record a tensor that no operator made. Foreign code may write a mask, but never into a parameter."""
        name = self.watch.source(tensor)
        history = self.record(tensor, "", peak)
        history.name = name
        if not self.watch.is_learned(tensor):
            if isinstance(peak, Tensor):
                history.mask = facts.additive_mask(tensor)
            else:
                history.meant = math.isinf(peak) and bool(facts.additive_mask(tensor))
        return history

    def _judge_fresh(self, read: list[Tensor], op: str) -> None:
        """Judge memory from `empty` when it is first read."""
        for tensor in read:
            history = self.entry(tensor)
            if history is None or not history.fresh:
                continue
            peak = facts.peak(tensor)
            if math.isfinite(peak) or (history.meant and math.isinf(peak)):
                self.record(tensor, history.writer, peak, meant=history.meant)
                continue
            history.fresh = False
            self.fresh -= 1
            what = "uninitialised_accumulator" if op.endswith("_") else "never_written"
            evidence = f"memory of {history.writer} is read by {op}, and no operator has written these elements"
            source = f"written between {history.writer} and {op}, or never"
            self._report(tensor, "what it read", op, peak, [tensor], [peak], False, source, Likely(what, evidence))
            history.reported, history.peak = True, peak

    # judging

    def _judge(
        self, func: Callable, effects: OperatorEffects, args: Any, kwargs: Any, out: Tensor, label: str,
        read: list[Tensor], before: dict[int, float | Tensor],
    ) -> None:  # fmt: skip
        value = self._measured(out)
        if not isinstance(value, Tensor) and math.isfinite(value):
            history = self.record(out, effects.name, value)
            if history.under is None:  # otherwise the facts about the rest are not known yet
                return
        literal = any(isinstance(v, float | complex) and not _finite(v) for v in facts.leaves((args, kwargs)))
        if not self.watch.sync:
            peaks_read = [before[id(t)] if id(t) in before else self._peak(t) for t in read]
            operands = tuple(
                (self._operand(t, 0.0), p, e)
                for t, p in zip(read, peaks_read, strict=True)
                if (e := self.entry(t)) is not None
            )
            before_it = self.entry(out)
            meant = before_it is not None and before_it.fresh and (literal or any(e.meant for _, _, e in operands))
            if isinstance(value, Tensor) or not math.isfinite(value):
                history = self.record(out, effects.name, value, meant=meant)
            self.notes.append(
                FlagRecord(effects.name, label, out.numel(), value, operands, self.watch.place(), history, literal)
            )
            if len(self.notes) >= FLUSH:
                self.flush()
            return
        value = float(value)
        peaks = [float(before[id(t)]) if id(t) in before else facts.peak(t) for t in read]
        entries = [self._entry_of(t, p) for t, p in zip(read, peaks, strict=True)]
        guilty = {i: owner(entries[i], p) for i, p in enumerate(peaks) if not math.isfinite(p)}
        unseen = [i for i, whose in guilty.items() if whose == FOREIGN]
        if not unseen and REPORTED in guilty.values():
            self.record(out, effects.name, value, reported=True)
            return
        created = None  # where it created Inf from finite numbers, beside infinities of the program
        if not unseen and math.isinf(value) and (guilty or literal):
            created = facts.infinite_there(out, read) if effects.pointwise and not literal else None
            if created is None:
                self.record(out, effects.name, value, meant=True)
                return
        if unseen:
            first = unseen[0]
            source, likely = self._entered(read[first], entries[first], effects.name)
            entry = entries[first] or self.record(read[first], "", peaks[first])
            entry.name = entry.name or source
            entry.reported = True
            self._report(out, label, effects.name, value, read, peaks, False, source, likely)
        else:
            likely = facts.cause(effects.name, func, args, kwargs, out, bool(effects.writes), bool(guilty), created)
            self._report(out, label, effects.name, value, read, peaks, True, effects.name, likely, created)
        self.record(out, effects.name, value, reported=True)

    def _entry_of(self, tensor: Tensor, peak: float) -> StorageHistory | None:
        """The facts about an operand that is not finite, if they are still known."""
        history = self.entry(tensor)
        if history is None and math.isinf(peak) and not self.watch.is_learned(tensor):
            return self._outside(tensor, peak) if bool(facts.additive_mask(tensor)) else None
        return history

    def _entered(self, tensor: Tensor, history: StorageHistory | None, op: str) -> tuple[str, Likely]:
        """The origin of a value that is not finite and that no operator was seen to create."""
        name = self.watch.source(tensor)
        facts.settle()
        if math.isfinite(facts.peak(tensor)):
            evidence = (
                f"{name} was not finite when {op} read it, and is finite after a synchronisation: it was not ready"
            )
            return name, Likely("missing_sync", evidence)
        if history is not None and history.writer and isinstance(history.peak, float) and math.isfinite(history.peak):
            between = f"written between {history.writer} and {op}"
            return between, Likely("unknown", f"{between}, outside of torch's operators: a custom kernel wrote it")
        return name, Likely("unknown", f"{name} was not finite when {op} read it")

    def _report(
        self, tensor: Tensor, label: str, op: str, peak: float, read: list[Tensor], peaks: list[float], born: bool,
        source: str, likely: Likely, bad: Tensor | None = None,
    ) -> None:  # fmt: skip
        facts.settle()
        count, index = facts.where(tensor, bad)
        if count == 0:
            evidence = f"read again after a synchronisation, {label} of {op} is finite: it was read before it was ready"
            likely = Likely("missing_sync", evidence)
        place = self.watch.place()
        operands = tuple(self._operand(t, p) for t, p in zip(read, peaks, strict=True))
        self.watch.report(
            Event(
                facts.kind_of(peak), place.phase, place.module, op, label, count, tensor.numel(), index, operands, born,
                source, place.step, facts.frame_texts(place.stack), likely,
            )
        )  # fmt: skip

    def _operand(self, tensor: Tensor, peak: float) -> Operand:
        return Operand(tuple(tensor.shape), facts.name_of(tensor.dtype), peak, self.watch.source(tensor))

    def flush(self) -> None:
        """Judge the recorded flags, which only sync=False records."""
        notes, self.notes = self.notes, []
        if not self.watch.sync:
            flags.flush(self.watch, notes, self.history.values())


def _run(func: Callable, args: Any, kwargs: Any) -> Any:
    """Run the operator, visible to an outer watch."""
    _aside.on = False
    try:
        return func(*args, **kwargs)
    finally:
        _aside.on = True


def _finite(number: complex) -> bool:
    return math.isfinite(number.real) and math.isfinite(number.imag)


def _at(args: Any, place: int | str) -> Any:
    return args[place] if isinstance(place, int) and place < len(args) else ()
