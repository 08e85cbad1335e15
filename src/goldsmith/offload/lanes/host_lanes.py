"""The lanes on device="cpu": the same slots, copies and waves as on a GPU, computed by one kernel.

Copies run in a thread of their own, so slots change hands through events here too. Kernels run in the caller's thread,
on the pool of the native library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int32
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..adapters import NO_ADAPTER, ActiveLora
from ..guard.faults import Faults
from ..memory.slots import SlotRing, begin_reading, end_reading
from ..memory.streams import Inline, Worker
from ..observe.statistics import Counts
from ..observe.trace import Trace
from ..planning.call import UNWRITTEN, Call, Outcome
from ..store.expert_store import ExpertStore
from .kernels import Kernels
from .merge import merge
from .slot_filling import LayerStreaming, SlotFilling, Wave

if TYPE_CHECKING:
    from ...experts._native_abi import NativeCall

MOST_ROWS = 1 << 28  # most bytes of rows per call; a longer call is computed in pieces
_ROWS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_FLAGS: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu"}


class HostLanes:
    """The lanes of an engine without a GPU; `run` computes one call."""

    returned, until, runs_ahead = 0.0, 0.0, False  # a call is over when it returns

    def __init__(
        self, store: ExpertStore, ring: SlotRing | None, streaming: LayerStreaming | None, threads: int, keep: bool,
        faults: Faults, trace: Trace, tally: Callable[[int], Counts], int8: int = 0,
    ) -> None:  # fmt: skip
        self.store, self.ring, self.streaming = store, ring, streaming
        self.keep, self.faults, self.trace, self.tally = keep, faults, trace, tally
        self._kernels, self.lora = Kernels(store.options, threads, int8), NO_ADAPTER
        self.transport = ("memory", "the device is the CPU: bytes are copied from memory to memory")
        self.copies, self.compute = Worker("goldsmith copies"), Inline()
        self.most_rows = max(1, MOST_ROWS // (4 * store.hidden_size))
        self._rows = [torch.empty(0, store.hidden_size, **_ROWS) for _ in range(2)]
        self._flags = [torch.empty(0, **_FLAGS) for _ in range(2)]

    def use(self, lora: ActiveLora) -> None:
        """Calls from now on add this LoRA to the experts."""
        self.lora = lora
        self._kernels.forget()

    # -- a call -------------------------------------------------------------------------------------------------------

    def run(self, call: Call) -> Outcome:
        rows, flags = self._buffers(0, call.routes)
        outcome = Outcome(rows, flags, rows)
        assignment = call.assignment
        if assignment.cached or assignment.copied or assignment.uploads or self.faults.on:
            skipped = _flat(call.ids) < 0
            flags.numpy()[:] = np.where(skipped, 0, UNWRITTEN)
            rows.numpy()[skipped] = 0.0  # no lane writes these rows, and the merge multiplies them by 0
            self._lanes(call, outcome)
        else:
            self._cpu(call, call.ids, rows, flags)
        if self.faults.on:
            self.faults.apply_to_results(call, outcome)
        begin = time.perf_counter()
        outcome.out = merge(rows, call.weights, call.caller_x.dtype)
        end = time.perf_counter()
        call.tally.t_merge += end - begin
        self.trace.span("merge", "merge", begin, end, layer=call.layer, tokens=len(call.x))
        return outcome

    def merged(self, layer: int, of: Sequence[Tensor], finite: c_int32) -> None:
        """Computes a call of few tokens with its sums, in one native call."""
        self._kernels.merged(of, self.store.experts(layer), self.lora.on_cpu(layer), finite)

    def step_call(self, layer: int, of: Sequence[Tensor]) -> NativeCall:
        """The arguments of a layer's call for a step, which keeps their tensors."""
        return self._kernels.merged_call(of, self.store.experts(layer), self.lora.on_cpu(layer))

    def team(self, layer: int, routes: int) -> int:
        """The threads of a call with so many routes."""
        return self._kernels.team(self.store.experts(layer).layout, routes)

    def to_host(self, ids: Tensor, x: Tensor, alone: bool) -> Tensor:
        return ids

    def flush(self) -> None:
        self.settle()

    def settle(self) -> None:
        self.copies.record().synchronize()

    def close(self) -> None:
        self.copies.close()

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _lanes(self, call: Call, outcome: Outcome) -> None:
        assignment = call.assignment
        waves = self._waves(call)
        first = next(waves, None)  # its copies and the next wave's run while the CPU works
        if assignment.cpu:
            ids = _only(call.ids, assignment.cpu, len(call.counts))
            rows, flags = self._buffers(1, call.routes)
            self._cpu(call, ids, rows, flags)
            self._place(call, outcome, ids, rows, flags, "cpu")
        while first is not None:
            self._device(call, outcome, first)
            first = next(waves, None)

    def _waves(self, call: Call) -> Iterator[Wave]:
        assignment = call.assignment
        if assignment.streamed and self.streaming is not None:
            return self.streaming.waves(call, self.copies, self._copied)
        if self.ring is None:
            return iter(())
        filling = SlotFilling(call, self.ring, self.copies, self._copied, keep=self.keep)
        return filling.waves(call.tally)

    def _cpu(self, call: Call, ids: Tensor, rows: Tensor, flags: Tensor) -> None:
        begin = time.perf_counter()
        base = self.store.experts(call.layer)
        self._kernels.rows(call.x, ids, base, rows, flags, self.lora.on_cpu(call.layer))
        end = time.perf_counter()
        experts = len(call.assignment.cpu)
        read = experts * self.store.expert_nbytes(call.layer)
        call.tally.t_cpu += end - begin
        call.tally.bytes_store_read += read
        self.trace.span("cpu", "experts", begin, end, layer=call.layer, experts=experts, tokens=len(call.x), bytes=read)

    def _device(self, call: Call, outcome: Outcome, wave: Wave) -> None:
        slots = [slot for _, slot in wave]
        arena = slots[0].arena
        waited = time.perf_counter()
        begin_reading(slots, self.compute)
        begin = time.perf_counter()
        ids = _only(call.ids, [e for e, _ in wave], len(call.counts), [slot.index for slot in slots])
        rows, flags = self._buffers(1, call.routes)
        lora = self.lora.in_slots(call.layer, [(e, slot.index) for e, slot in wave], len(arena))
        self._kernels.rows(call.x, ids, arena.base, rows, flags, lora)
        end_reading(slots, self.compute)
        for expert, slot in wave:
            outcome.slots[expert] = (slot, slot.generation)
        self._place(call, outcome, ids, rows, flags, "device")
        end = time.perf_counter()
        call.tally.t_wait += begin - waited
        call.tally.t_device += end - begin
        self.trace.span("device", "experts", begin, end, layer=call.layer, experts=len(wave), tokens=len(call.x))

    def _place(self, call: Call, outcome: Outcome, ids: Tensor, rows: Tensor, flags: Tensor, lane: str) -> None:
        """Copies rows of one lane to where the merge reads them."""
        routes = np.flatnonzero(_flat(ids) >= 0)
        some = rows.numpy()[routes]
        if lane == "cpu":
            outcome.host = (torch.from_numpy(some), routes)
        outcome.rows.numpy()[routes] = some
        outcome.known_flags().numpy()[routes] = flags.numpy()[routes]

    def _copied(self, layer: int, experts: Sequence[int], into: Sequence[Tensor]) -> None:
        """Fills slots; runs in the copying thread."""
        for expert, data in zip(experts, into, strict=True):
            self._copy(layer, expert, data)

    def _copy(self, layer: int, expert: int, into: Tensor) -> None:
        begin = time.perf_counter()
        into.copy_(self.store.raw(layer, expert))
        if self.faults.on:
            self.faults.apply_to_slot(layer, expert, into)
        end = time.perf_counter()
        tally, size = self.tally(layer), into.numel()
        tally.t_link += end - begin
        tally.bytes_h2d += size
        tally.bytes_store_read += size
        self.trace.span("link", "copy", begin, end, layer=layer, expert=expert, bytes=size)

    def _buffers(self, which: int, routes: int) -> tuple[Tensor, Tensor]:
        """Rows and flags for this many routes, kept from call to call. which: 0 for the merge, 1 for a lane."""
        if len(self._rows[which]) < routes:
            with torch.inference_mode(False):  # the buffers are also written in calls outside inference mode
                self._rows[which] = torch.empty(routes, self.store.hidden_size, **_ROWS)
                self._flags[which] = torch.empty(routes, **_FLAGS)
        return self._rows[which][:routes], self._flags[which][:routes]


def _flat(ids: Tensor) -> np.ndarray:
    """ids [T k] as a numpy array, which makes a mask in a third of torch's time."""
    return ids.numpy().reshape(-1)


def _only(ids: Tensor, experts: Sequence[int], count: int, to: Sequence[int] | None = None) -> Tensor:
    """ids with only these experts' numbers, or their counterparts in `to`; -1 for all others."""
    table = np.full(count + 1, -1)  # -1, a skipped route, reads the last one
    table[list(experts)] = experts if to is None else to
    return torch.from_numpy(table[ids.numpy()])
