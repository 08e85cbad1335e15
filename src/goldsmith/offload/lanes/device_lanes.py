"""The lanes with a GPU: the CPU's kernel in a thread, copies on a stream, GPU kernels on the caller's stream.

Order of a call: ids to the host, and x with them if the tokens are few (the only wait), CPU work, copies, device work,
the CPU's rows, merge. If the stream can wait for the CPU's rows by itself, the call returns early, and the CPU lane's
errors and times are collected in the next call. A prompt's x travels to the CPU while copies begin, and is waited for
too. Rows are sorted by lane and expert, so each lane computes one range of them; `place` maps routes to rows. Only the
caller's thread launches GPU work. A kernel's inputs are written earlier in its stream, or behind an event that the
stream waits for. Between the wait and the last launch the device is nearly idle, so that part takes few steps: lists
are sent in one copy, launches and views are cached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..adapters import NO_ADAPTER, ActiveLora
from ..guard.faults import Faults
from ..memory.budget import Spending
from ..memory.machine import CudaMachine
from ..memory.pinned_buffers import Packets, PinnedBuffers
from ..memory.slots import SlotRing, begin_reading, end_reading
from ..memory.streams import DONE, CudaStream, StreamEvent
from ..observe.statistics import Counts
from ..observe.trace import Trace
from ..planning.call import Call, Outcome
from ..store.expert_store import ExpertStore
from .cpu_beside_gpu import FETCHED, CpuBesideGpu
from .kernels import kernel_module
from .route_order import SortedRoutes, sort_routes
from .slot_filling import LayerStreaming, SlotFilling, Wave

if TYPE_CHECKING:
    from ...experts._kernels.panels import Config

_MARKS = 256  # most timings kept unread

Look = Callable[[Call, Outcome, bool], None] | None


class DeviceLanes:
    """The CPU lane, the copies and the GPU kernels of an engine; `run` computes one call."""

    def __init__(
        self, store: ExpertStore, machine: CudaMachine, spending: Spending, ring: SlotRing | None,
        streaming: LayerStreaming | None, threads: int, keep: bool, faults: Faults, trace: Trace,
        tally: Callable[[int], Counts], look: Look, ahead: bool,
    ) -> None:  # fmt: skip
        """look: the guard's function for a finished call; None: no guard. ahead: a call may return before the CPU lane
        has finished; its times are then read in the next call.
        """
        self.store, self.machine, self.ring, self.streaming = store, machine, ring, streaming
        self.threads, self.keep, self.faults, self.trace, self.tally = threads, keep, faults, trace, tally
        self.look, self.most_rows = look, max(1, spending.rows)
        self.transport: tuple[str, str] = machine.mode_and_reason
        rows = self.most_rows
        on: dict[str, Any] = {"device": machine.device}
        self.copies, self.cpu = machine.copies, CpuBesideGpu(store, machine, rows, threads)
        with torch.inference_mode(False):
            self.rows = torch.empty(rows, store.hidden_size, dtype=torch.float32, **on)
            self.h = torch.empty(rows * store.intermediate_size, dtype=torch.float32, **on)
            self.lists = torch.empty(3 * rows, dtype=torch.int32, **on)  # rewritten behind its readers, in stream order
            self.tiles = torch.empty(4 * (rows // 4 + 1024), dtype=torch.int32, **on)
            self.dirty = machine.host(4).view(torch.int32)
        self.h_narrow = self.h.view(torch.bfloat16)
        self._dirty = self.dirty.numpy()  # the same word, without the overhead of a torch operation
        self._dirty[0] = 0
        self.heads, self.small = Packets(machine.host, machine.device, 2), Packets(machine.host, machine.device)
        self.large = PinnedBuffers(machine.host, 8)
        self.runs_ahead = ahead and self.cpu.signals_stream
        self._open: tuple[Call, Tensor] | None = None  # the last call, if the CPU may still be working on it
        # on the clock of time.perf_counter(): when the last call returned, and the end of the time already counted
        self.returned = self.until = 0.0
        # the compute stream of the last call, and the event at that call's end
        self._last: torch.cuda.Stream | None = None
        self._end: StreamEvent = DONE
        self._now: Any = None  # the compute stream of this call
        self._done: torch.cuda.Event | None = None  # the event after the last wave of this call
        self._wanted = False  # whether the last call used the CPU lane
        self.lora: ActiveLora = NO_ADAPTER
        self._pending: tuple[Call, Outcome] | None = None
        self._marks: list[tuple[Counts, str, torch.cuda.Event, torch.cuda.Event, dict[str, object] | None]] = []

    def use(self, lora: ActiveLora) -> None:
        """Calls from now on add this LoRA to the experts; all earlier work must be done."""
        self.lora = self.cpu.lora = lora
        self.cpu.lane.forget()

    # -- a call -------------------------------------------------------------------------------------------------------

    def to_host(self, index: Tensor, x: Tensor, alone: bool) -> Tensor:
        """The ids on the CPU, valid until the second call after this one. alone: the CPU will not need x.

        The flags of the call before are known afterwards.
        """
        ids = self.cpu.to_host(index, x, alone, self._stream())
        if self._open is not None:
            self.until = max(self.returned, self._finish())
        else:
            self.cpu.lane.abandon()  # the CPU began, but then the guard raised
        if not alone and self._wanted:
            self.cpu.lane.ready()
        return ids

    def run(self, call: Call) -> Outcome:
        if call.first_row:
            self._finish_piece()
        end = self.machine.new_mark()
        try:
            outcome = self._launch_all(call, self._now, end)
        finally:  # also after a failure: the next call, perhaps on another stream, waits for whatever was launched
            self._end = end
            self.machine.set(end, self._now)
        self._pending = (call, outcome)
        self._wanted = outcome.host is not None
        return outcome

    def _launch_all(self, call: Call, stream: CudaStream, end: torch.cuda.Event) -> Outcome:
        """Gives `stream` all work of the call; the caller sets `end` behind it."""
        where = sort_routes(call.ids, call.counts, call.assignment.cpu)
        outcome = Outcome(self.rows, None, call.caller_x, where.place)
        cpu_rows, cpu_x = self._begin_cpu(call, where)
        if call.tokens > 1 and self.ring is not None:  # a prompt: later, compiling would hold up the text for seconds
            kernel_module("experts._kernels.vectors").forward(
                call.x, self.lists[:1], self.tiles[:3].view(3, 1), self.ring.slots[0].arena.base, None,
                self._inner(call), self.rows, 1, compile_only=True, **self.store.options,
            )  # fmt: skip
        begin = self.machine.mark(stream)
        self._done = None
        waves = self._waves(call)
        wave = next(waves, None)  # its copies have begun
        if cpu_x is not None:
            self.machine.wait(stream)
            cpu_rows = self.cpu.begin(call, where, cpu_x)
        place, tokens, tiles = self._lists(call, where, wave, stream)
        while wave is not None:
            self._device(call, outcome, where, tokens, wave, tiles, stream)
            wave, tiles = next(waves, None), None
        before = self._done or self.machine.mark(stream)
        merge = self._merge(call, outcome, place, cpu_rows)
        self._mark(call.tally, "device", begin, before, layer=call.layer, tokens=call.tokens)
        self.heads.release(end)
        self.cpu.results.release(end)
        if cpu_rows is not None:
            if len(self._marks) > _MARKS // 8:  # now, while the CPU works
                self._read_marks()
            outcome.host = (cpu_rows, where.order[: len(cpu_rows)])
            times = self._send_cpu_rows(call, cpu_rows, stream)
            before = self.machine.mark(stream)
        if self.faults.on:
            self.faults.apply_to_results(call, outcome)
        merge()
        if cpu_rows is not None and times is not None:
            self._count_cpu(call, cpu_rows, *times)
        self._mark(call.tally, "merge", before, end, layer=call.layer, tokens=call.tokens)
        return outcome

    def _finish_piece(self) -> None:
        """Finishes a piece and lets the guard check it, before the next piece of the same call reuses its rows."""
        if self._open is not None:
            self.returned = math.inf  # none of the piece's time is left to count
            self._finish()
        if self.look is not None:
            self._end.synchronize()
            self.look_back()

    def look_back(self) -> None:
        """Passes the last call, or piece of one, to the guard; its work must be done."""
        if len(self._marks) > _MARKS:
            self._read_marks()
        pending, self._pending = self._pending, None
        wrong = bool(self._dirty[0])
        self._dirty[0] = 0
        if pending is not None and self.look is not None:
            self.look(*pending, wrong)

    def flush(self) -> None:
        self.settle()
        self.look_back()

    def settle(self) -> None:
        """Waits for all work under way, and reads its times."""
        self._end.synchronize()
        self._finish()
        self.machine.settle()
        self._read_marks()

    def close(self) -> None:
        """Raises errors of the last call that were not reported yet (CPU lane, guard), then releases everything."""
        try:
            self._end.synchronize()
            self._finish()
            self.look_back()
        finally:
            self.cpu.close()
            self.machine.close()
            self._pending = None
            self._marks.clear()
            del self.rows, self.h, self.h_narrow, self.lists, self.tiles, self.heads, self.small

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _begin_cpu(self, call: Call, where: SortedRoutes) -> tuple[Tensor | None, Tensor | None]:
        """(rows that the CPU already computes, None), or (None, its x on the way), or neither if it has no experts."""
        if self.cpu.begun is not None:
            call.tally.bytes_d2h += call.x.nbytes
            return self.cpu.begun, None
        if not call.assignment.cpu:
            return None, None
        x, arriving = self.cpu.gather_inputs(call, where)
        return (None, x) if arriving else (self.cpu.begin(call, where, x), None)

    def _stream(self) -> CudaStream:
        """The caller's current stream, made to wait for the last call, whose stream may use the same buffers."""
        stream = self.machine.compute()
        handle = getattr(stream, "stream", None)
        if handle != self._last:
            stream.wait(self._end)
            self._last = handle
        self._now = stream
        return stream

    def _lists(
        self, call: Call, where: SortedRoutes, wave: Wave | None, stream: CudaStream
    ) -> tuple[Tensor, Tensor, tuple[Config, Tensor] | None]:
        """place [T k], and the token of each sorted row, on the device; for few routes also the first wave's tiles."""
        k, config = max(1, call.ids.shape[1]), None
        if isinstance(where.order, list) and isinstance(where.place, list):
            tiles: list[int] = []
            if wave is not None:
                config, tiles = self._tiles(call, where, wave)
            tokens = [route // k for route in where.order]
            parts = self.heads.send((where.place, tokens, tiles), self.machine.move, stream)
            return parts[0], parts[1], None if config is None else (config, self._as_tiles(call, parts[2]))
        routes, rows = call.routes, len(where.order)
        host = self.large.take((routes + rows,), torch.int32)
        there = host.numpy()
        there[:routes] = where.place
        there[routes:] = np.asarray(where.order) // k
        device = self.lists[: routes + rows]
        self.machine.move(host, device, stream)
        self.large.release(stream.record())
        return device[:routes], device[routes:], None

    def _tiles(self, call: Call, where: SortedRoutes, wave: Wave) -> tuple[Config, list[int]]:
        """The kernels' configuration, and the tiles of a wave, concatenated: slots, first rows, row counts, and with
        LoRA the experts.
        """
        panels = kernel_module("experts._kernels.panels")
        counts = [call.counts[e] for e, _ in wave]
        config = panels.pick(max(counts))
        starts = [where.start[e] for e, _ in wave]
        if self.lora.on_device(call.layer) is None:
            slots, first, rows = panels.tiles_of([slot.index for _, slot in wave], counts, starts, config.rows)
            return config, [*slots, *first, *rows]
        which, first, rows = panels.tiles_of(list(range(len(wave))), counts, starts, config.rows)
        return config, [*(wave[i][1].index for i in which), *first, *rows, *(wave[i][0] for i in which)]

    def _as_tiles(self, call: Call, listed: Tensor) -> Tensor:
        return listed.view(3 if self.lora.on_device(call.layer) is None else 4, -1)

    def _send_tiles(self, call: Call, where: SortedRoutes, wave: Wave, stream: CudaStream) -> tuple[Config, Tensor]:
        """`_tiles` sent to the device."""
        config, listed = self._tiles(call, where, wave)
        if len(listed) <= self.small.size:
            (tiles,) = self.small.send((listed,), self.machine.move, stream)
            self.small.release(stream.record())
        else:
            host = self.large.take((len(listed),), torch.int32)
            host.numpy()[:] = listed
            tiles = self.tiles[: len(listed)]
            self.machine.move(host, tiles, stream)
            self.large.release(stream.record())
        return config, self._as_tiles(call, tiles)

    def _send_cpu_rows(self, call: Call, cpu_rows: Tensor, stream: CudaStream) -> tuple[float, float] | None:
        """Sends the CPU's rows to the device, unless the merge reads them from host memory; returns the lane's begin
        and end

        Returns None if the stream waits for the lane and the caller goes on. Otherwise the device is idle until the
        merge is launched, so everything else happens before or after this.
        """
        if self.runs_ahead and not self.faults.on:  # faults are planted in between
            times = None
            self.cpu.make_stream_wait(stream)
            self._open, self.returned = (call, cpu_rows), time.perf_counter()
        else:
            waited = time.perf_counter()
            times = self.cpu.end()
            call.tally.t_wait += time.perf_counter() - waited
        if not self._merge_reads_host(call):
            self.machine.move(cpu_rows, self.rows[: cpu_rows.shape[0]], stream)
        return times

    def _finish(self) -> float:
        """Collects the CPU lane's result of the last call: returns its end, or raises its error."""
        if self._open is None:
            return 0.0
        waited, (call, cpu_rows) = time.perf_counter(), self._open
        self._open = None
        try:
            begin, end = self.cpu.end()
        except (ValueError, RuntimeError, MemoryError) as error:
            self._pending, self._dirty[0] = None, 0  # its rows were not written, so the guard has nothing to check
            message = f"offload.Engine: the call before failed ({call.tokens} tokens in layer {call.layer}): {error}"
            raise type(error)(message) from error
        call.tally.t_wait += time.perf_counter() - waited
        self._count_cpu(call, cpu_rows, begin, end)
        overtime = max(0.0, end - self.returned)
        call.tally.t_wall += overtime
        call.tally.t_bound += overtime if call.assignment.predicted is not None else 0.0
        return end

    def _count_cpu(self, call: Call, cpu_rows: Tensor, begin: float, end: float) -> None:
        tally, experts = call.tally, len(call.assignment.cpu)
        tally.t_cpu += end - begin
        tally.bytes_h2d += cpu_rows.nbytes
        tally.bytes_store_read += experts * self.store.expert_nbytes(call.layer)
        self.trace.span("cpu", "experts", begin, end, layer=call.layer, experts=experts, tokens=call.tokens)

    def _merge_reads_host(self, call: Call) -> bool:
        """Whether the merge reads the CPU's rows from host memory: a copy would queue behind copies of experts."""
        return call.routes <= FETCHED and call.tokens == 1 and not self.faults.on

    def _waves(self, call: Call) -> Iterator[Wave]:
        assignment = call.assignment
        if assignment.streamed and self.streaming is not None:
            return self.streaming.waves(call, self.copies, self.copy_experts)
        if self.ring is None:
            return iter(())
        filling = SlotFilling(call, self.ring, self.copies, self.copy_experts, keep=self.keep)
        return filling.waves(call.tally)

    def _device(
        self, call: Call, outcome: Outcome, where: SortedRoutes, tokens: Tensor, wave: Wave,
        sent: tuple[Config, Tensor] | None, stream: CudaStream,
    ) -> None:  # fmt: skip
        slots = [slot for _, slot in wave]
        config, tiles = sent or self._send_tiles(call, where, wave, stream)
        h = self._inner(call)
        forward, base = kernel_module("experts._kernels.panels").panels_forward, slots[0].arena.base
        begin_reading(slots, stream)
        lora = self.lora.on_device(call.layer)
        forward(call.x, tokens, tiles, base, h, self.rows, config, lora=lora, **self.store.options)
        self._done = self.machine.mark(stream)
        end_reading(slots, stream, self._done)
        for expert, slot in wave:
            outcome.slots[expert] = (slot, slot.generation)

    def _inner(self, call: Call) -> Tensor:
        return self.h_narrow if call.x.dtype == torch.bfloat16 else self.h

    def _merge(self, call: Call, outcome: Outcome, place: Tensor, cpu_rows: Tensor | None) -> Callable[[], None]:
        """Sets outcome.out; returns the function that launches the merge."""
        weights, merger = call.weights.contiguous(), kernel_module("offload.lanes._triton").merger
        fetched = cpu_rows if cpu_rows is not None and self._merge_reads_host(call) else None
        outcome.out, launch = merger(self.rows, place, weights, call.caller_x.dtype, self.dirty, fetched)
        return launch

    def copy_experts(self, layer: int, experts: Sequence[int], into: Sequence[Tensor]) -> None:
        """Copies experts to their slots and times them together, or each by itself for a trace."""
        if self.trace.on and len(experts) > 1:
            for expert, data in zip(experts, into, strict=True):
                self.copy_experts(layer, (expert,), (data,))
            return
        begin, machine, store, size = self.machine.mark(self.copies), self.machine, self.store, 0
        for expert, data in zip(experts, into, strict=True):
            machine.copy(store.raw(layer, expert), data)
            size += data.numel()
            if self.faults.on:
                machine.run_on_copies(lambda e=expert, d=data: self.faults.apply_to_slot(layer, e, d))
        tally = self.tally(layer)
        tally.bytes_h2d += size
        tally.bytes_store_read += size
        self._mark(tally, "link", begin, machine.mark(self.copies), layer=layer, expert=experts[0], bytes=size)

    def _read_marks(self) -> None:
        """Reads the timings of finished work; a copy for later calls may still be under way."""
        marks, self._marks = self._marks, []
        for tally, lane, begin, end, args in marks:
            if not self.machine.happened(end):
                self._marks.append((tally, lane, begin, end, args))
                continue
            seconds = self.machine.seconds(begin, end)
            setattr(tally, f"t_{lane}", getattr(tally, f"t_{lane}") + seconds)
            if args is not None:
                at = self.machine.time_of(begin)
                self.trace.span(lane, lane, at, at + seconds, **args)

    def _mark(self, tally: Counts, lane: str, begin: torch.cuda.Event, end: torch.cuda.Event, **args: object) -> None:
        """Remembers a pair of marks, to be read later without waiting."""
        self._marks.append((tally, lane, begin, end, args if self.trace.on else None))
