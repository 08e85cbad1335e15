"""The lanes with a GPU: the CPU's kernel in a thread, copies on a stream, kernels of the device on the caller's stream.

Order of a call: ids to the host (the one wait), CPU work, copies, device work, the CPU's rows, merge. Rows lie sorted
by lane and expert, so that what a lane makes is one range of them; `place` says where a route's row is. Threads launch
nothing on the GPU. What a kernel reads was written before it in its stream, or behind an event that it waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .budget import Spending
from .call import Call, Outcome
from .faults import Faults
from .filling import Filling, Streaming, Wave
from .kernel import kernel_dtype, loaded, rows_of
from .routes import Sorted, sort_routes
from .slots import Ring, begin_reading, end_reading
from .statistics import Counts
from .store import ExpertStore
from .streams import DONE, Worker
from .trace import Trace
from .transit import Transit

_UPLOADS = 8  # small lists on their way to the device at a time
_MARKS = 256  # timings that wait to be read

Look = Callable[[Call, Outcome, bool], None]


class DeviceLanes:
    def __init__(
        self, store: ExpertStore, machine: Any, spending: Spending, ring: Ring | None, streaming: Streaming | None,
        threads: int, keep: bool, faults: Faults, trace: Trace, tally: Callable[[int], Counts], look: Look,
    ) -> None:  # fmt: skip
        self.store, self.machine, self.ring, self.streaming = store, machine, ring, streaming
        self.threads, self.keep, self.faults, self.trace, self.tally = threads, keep, faults, trace, tally
        self.look, self.most_rows = look, max(1, spending.rows)
        self.transport: tuple[str, str] = machine.way
        self.copies, self.worker = machine.copies, Worker("goldsmith CPU lane")
        rows, on = self.most_rows, {"device": machine.device}
        with torch.inference_mode(False):
            self.rows = torch.empty(rows, store.hidden_size, **on)
            self.h = torch.empty(rows * store.intermediate_size, **on)
            self.lists = [torch.empty(3 * rows, dtype=torch.int32, **on) for _ in range(2)]
            self.tiles = [torch.empty(3 * (rows // 16 + 1024), dtype=torch.int32, **on) for _ in range(_UPLOADS)]
            self.dirty = machine.host(4).view(torch.int32)
        self.dirty.zero_()
        self.ids, self.x, self.made = (Transit(machine.host) for _ in range(3))
        self.small, self.large = Transit(machine.host, _UPLOADS), Transit(machine.host)
        self._turn = 0
        self._last: Any = None  # the compute stream of the last call, and where that call ended in it
        self._end: Any = DONE
        self._pending: tuple[Call, Outcome] | None = None
        self._marks: list[tuple[Counts, str, Any, Any, dict[str, Any] | None]] = []

    # -- a call -------------------------------------------------------------------------------------------------------

    def to_host(self, index: Tensor) -> Tensor:
        """The ids on the CPU; by then the flags of the call before are known, too."""
        stream = self._stream()
        host = self.ids.take(tuple(index.shape), index.dtype)
        stream.run(lambda: host.copy_(index, non_blocking=True))
        event = stream.record()
        event.synchronize()
        self.ids.give_back(event)
        self.look_back()
        if len(self._marks) > _MARKS:
            self._read_marks()
        return host.clone()

    def run(self, call: Call) -> Outcome:
        stream, given = self._stream(), call.assignment
        where = sort_routes(call.ids, call.counts, given.cpu)
        place, tokens = self._lists(call, where, stream)
        outcome = Outcome(self.rows, None, call.given, where.place)
        done = self._begin_cpu(call, where, stream) if given.cpu else None
        begin = self.machine.mark(stream)
        waves = self._waves(call)
        for wave in waves:
            self._device(call, outcome, where, tokens, wave, stream)
        end = self.machine.mark(stream)
        self._mark(call.tally, "device", begin, end, layer=call.layer, tokens=len(call.x))
        if done is not None:
            self._finish_cpu(call, outcome, where, done, stream)
            end = self.machine.mark(stream)
        if self.faults.on:
            self.faults.computed(call, outcome)
        stream.run(lambda: self._merge(call, outcome, place))
        self._mark(call.tally, "merge", end, self.machine.mark(stream), layer=call.layer, tokens=len(call.x))
        self._end = stream.record()
        self._pending = (call, outcome)
        return outcome

    def look_back(self) -> None:
        """What the guard has to say of the last call, whose work is done."""
        pending, self._pending = self._pending, None
        wrong = bool(self.dirty[0])
        self.dirty.zero_()
        if pending is not None:
            self.look(*pending, wrong)

    def flush(self) -> None:
        self.settle()
        self.look_back()

    def settle(self) -> None:
        """Waits for what is under way, and reads its times."""
        self._end.synchronize()
        self.machine.settle()
        self._read_marks()

    def close(self) -> None:
        self._end.synchronize()
        self.worker.close()
        self.machine.close()
        self._pending = None
        self._marks.clear()
        del self.rows, self.h, self.lists, self.tiles

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _stream(self) -> Any:
        """The caller's stream, behind the last call: its buffers are ours, and that may have been another stream."""
        stream = self.machine.compute()
        handle = getattr(stream, "stream", None)
        if handle != self._last:
            stream.wait(self._end)
            self._last = handle
        return stream

    def _lists(self, call: Call, where: Sorted, stream: Any) -> tuple[Tensor, Tensor]:
        """place [T, k] and the token of each sorted row, on the device, in one copy."""
        routes, rows = call.routes, len(where.order)
        host = self.large.take((routes + rows,), torch.int32)
        host[:routes] = where.place
        host[routes:] = where.order // max(1, call.ids.shape[1])
        self.lists.reverse()
        device = self.lists[0][: routes + rows]
        stream.run(lambda: device.copy_(host, non_blocking=True))
        self.large.give_back(stream.record())
        return device[:routes].view(call.ids.shape), device[routes:]

    def _begin_cpu(self, call: Call, where: Sorted, stream: Any) -> tuple[Any, Tensor]:
        n = where.leading
        x = self.x.take(tuple(call.x.shape), call.x.dtype)
        stream.run(lambda: x.copy_(call.x, non_blocking=True))
        arrived = stream.record()
        call.tally.bytes_d2h += x.nbytes
        made = self.made.take((n, self.store.hidden_size), torch.float32)
        routes = where.order[:n]
        ids = call.ids.view(-1)[routes].view(n, 1)

        def work() -> None:
            arrived.synchronize()
            begin = time.perf_counter()
            some = x.index_select(0, routes // call.ids.shape[1]).to(kernel_dtype(x.dtype))
            flags = torch.empty(n, dtype=torch.uint8)
            rows_of(some, ids, self.store.experts(call.layer), made, flags, self.store.options, self.threads)
            end = time.perf_counter()
            experts = len(call.assignment.cpu)
            call.tally.t_cpu += end - begin
            call.tally.bytes_store_read += experts * self.store.expert_nbytes(call.layer)
            self.trace.span("cpu", "experts", begin, end, layer=call.layer, experts=experts, tokens=len(x))

        self.worker.run(work)
        done = self.worker.record()
        self.x.give_back(done)
        return done, made

    def _finish_cpu(self, call: Call, outcome: Outcome, where: Sorted, done: tuple[Any, Tensor], stream: Any) -> None:
        event, made = done
        begin = time.perf_counter()
        event.synchronize()
        call.tally.t_wait += time.perf_counter() - begin
        stream.run(lambda: self.rows[: len(made)].copy_(made, non_blocking=True))
        self.made.give_back(stream.record())
        call.tally.bytes_h2d += made.nbytes
        outcome.host = (made, where.order[: len(made)])

    def _waves(self, call: Call) -> Iterator[Wave]:
        given = call.assignment
        if given.streamed and self.streaming is not None:
            return self.streaming.waves(call, self.copies, self._copy)
        if self.ring is None:
            return iter(())
        filling = Filling(call.layer, given, call.cache, self.ring, self.copies, self._copy, keep=self.keep)
        return filling.waves(call.tally)

    def _device(self, call: Call, outcome: Outcome, where: Sorted, tokens: Tensor, wave: Wave, stream: Any) -> None:
        panels = loaded("experts._kernels.panels")
        slots = [slot for _, slot in wave]
        counts = [call.counts[e] for e, _ in wave]
        config = panels.pick(max(counts))
        listed = panels.tiles_of([s.index for s in slots], counts, [where.start[e] for e, _ in wave], config.rows)
        host = self.small.take((3, len(listed[0])), torch.int32)
        host.copy_(torch.tensor(listed, dtype=torch.int32))
        self._turn = (self._turn + 1) % _UPLOADS
        tiles = self.tiles[self._turn][: host.numel()].view(host.shape)
        narrow = call.x.dtype == torch.bfloat16
        h = self.h.view(torch.bfloat16) if narrow else self.h
        h = h[: len(tokens) * self.store.intermediate_size].view(len(tokens), -1)

        def work() -> None:
            tiles.copy_(host, non_blocking=True)
            base = slots[0].arena.base
            panels.panels_forward(call.x, tokens, tiles, base, h, self.rows, config, **self.store.options)

        begin_reading(slots, stream)
        stream.run(work)
        end_reading(slots, stream)
        self.small.give_back(slots[0].last_use)
        for expert, slot in wave:
            outcome.slots[expert] = (slot, slot.generation)

    def _merge(self, call: Call, outcome: Outcome, place: Tensor) -> None:
        merge = loaded("offload._triton").merge
        outcome.out = merge(self.rows, place, call.weights.contiguous(), call.given.dtype, self.dirty)

    def _copy(self, layer: int, expert: int, into: Tensor) -> None:
        begin = self.machine.mark(self.copies)
        self.machine.copy(self.store.raw(layer, expert), into)
        if self.faults.on:
            self.faults.copied(layer, expert, into)
        tally, size = self.tally(layer), into.numel()
        tally.bytes_h2d += size
        tally.bytes_store_read += size
        self._mark(tally, "link", begin, self.machine.mark(self.copies), layer=layer, expert=expert, bytes=size)

    def _read_marks(self) -> None:
        marks, self._marks = self._marks, []
        for tally, lane, begin, end, args in marks:
            seconds = self.machine.seconds(begin, end)
            setattr(tally, f"t_{lane}", getattr(tally, f"t_{lane}") + seconds)
            if args is not None:
                at = self.machine.when(begin)
                self.trace.span(lane, lane, at, at + seconds, **args)

    def _mark(self, tally: Counts, lane: str, begin: Any, end: Any, **args: Any) -> None:
        """A time that is read later, when nobody has to wait for it."""
        self._marks.append((tally, lane, begin, end, args if self.trace.on else None))
