"""The experts of a recorded step: the device computes those that it holds, the CPU the rest, and the device waits.

For each layer the device sends its tokens and their experts to host memory and sets a word. The CPU, in `serve`,
waits for the word, computes the experts that the table of slots does not have, and sets another word, for which the
device waits before it adds the rows. If the device holds every expert, it asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, addressof, byref, cast
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core import native
from ...experts._native_abi import MoeArgs, busy
from ..engine import Engine
from ..lanes.kernels import Kernels, kernel_dtype, kernel_module
from ..memory.machine import CudaMachine
from ..memory.slots import Slot, begin_reading, fill
from ..settings import int8_group
from ._native_abi import ServeArgs, ServedLayer
from .residency import Residency

PATIENCE = 60.0  # seconds that the CPU waits for a layer


class GraphExperts:
    """y [T, H] = the experts of x for T tokens of k experts each, as a part of a recording

    asks   whether the CPU computes experts, so that `serve` must follow every launch of the recording
    """

    def __init__(self, engine: Engine, tokens: int, k: int, dtype: torch.dtype) -> None:
        lanes, store = engine.device_lanes, engine.store
        self.engine, self.store, self.lanes = engine, store, lanes
        self.machine: Any = CudaMachine(None, engine.device) if lanes is None else lanes.machine
        self.layers = store.layers
        self._row_of = {layer: row for row, layer in enumerate(self.layers)}
        self.asks = not self._whole()
        self._rehearsing, self._calls_seen = False, -1
        wide = max(store.num_experts(layer) for layer in self.layers)
        routes, H, device = tokens * k, store.hidden_size, self.machine.device
        self.routes, self.k = routes, k
        on: dict[str, Any] = {"device": device}
        with torch.inference_mode(False):
            self.slots_there = torch.full((len(self.layers), wide), -1, dtype=torch.int32, **on)
            self.uses_there = torch.zeros(len(self.layers), wide, dtype=torch.int32, **on)
            self.rows = torch.zeros(2 * routes, H, dtype=torch.float32, **on)
            # a tile without rows reads the element before its first one
            self.h = torch.zeros((routes + 1) * store.intermediate_size, dtype=_inner(dtype), **on)
            self.h = self.h[store.intermediate_size :]
            listed = torch.arange(-k, routes, dtype=torch.int32, **on).clamp(min=0) // k
            self.tokens = listed[k:]
            self.tiles = torch.zeros(3, routes, dtype=torch.int32, **on)
            self.tiles[1] = torch.arange(routes, dtype=torch.int32, **on)
            self.place = torch.zeros(tokens, k, dtype=torch.int32, **on)
            self.table = self.host((len(self.layers), wide), torch.int32)
            self.wrong = self.host((1,), torch.int32)
            self.words = self.host((32,), torch.int32)  # question and answer, on different lines of the cache
            self.x_here = self.host((tokens, H), kernel_dtype(dtype))
            self.routed = self.host((tokens, k), torch.int64)
            self.rows_here = self.host((routes, H), torch.float32)
            self.ids = torch.full((tokens, k), -1, dtype=torch.int64, device="cpu")
            self.flags = torch.zeros(routes, dtype=torch.uint8, device="cpu")
            self.uses = torch.zeros(len(self.layers), wide, dtype=torch.int64, device="cpu")
        self.residency = Residency(
            self.layers, engine.caches, self.table.numpy(), getattr(engine.calibration, "costs", None)
        )
        self._counted = np.zeros((len(self.layers), wide), dtype=np.int64)
        self._cpu_counted = np.zeros(len(self.layers), dtype=np.int64)
        self._on_cpu, self.steps = 0, 0
        if self.asks:
            self._prepare_serving()

    # -- within a recording -------------------------------------------------------------------------------------------

    def call(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Launches the work of one layer: x [T, H], ids and weights [T, k] -> y [T, H] in x's dtype."""
        row, stream, kernels = self._row_of[layer], self.machine.compute(), kernel_module("offload.lanes._triton")
        steps = kernel_module("offload.decoding._triton")
        x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.contiguous()
        experts = self.store.num_experts(layer)
        if self.asks:
            inner = x.to(self.x_here.dtype)
            kernels.fetch(inner.view(1, -1), ids.view(1, -1), self.x_here.view(1, -1), self.routed.view(1, -1))
            if not self._rehearsing:
                self.machine.write_word(self.words[:1], 1, stream)
        slots, uses = self.slots_there[row, :experts], self.uses_there[row, :experts]
        steps.locate(ids, slots, self.tiles, self.place, uses, self.wrong)
        base = self._base()
        if base is not None:
            kernel_module("experts._kernels.vectors").forward(
                x, self.tokens, self.tiles, base, None, self.h, self.rows[self.routes :], 1, **self.store.options
            )
        if self.asks and not self._rehearsing:
            self.machine.wait_for_word(self.words[16:17], 1, stream)
            self.machine.write_word(self.words[16:17], 0, stream)
        fetched = self.rows_here if self.asks else None
        out, merge = kernels.merger(self.rows, self.place, weights, x.dtype, self.wrong, fetched)
        merge()
        return out

    def rehearse(self, run: Callable[[], None]) -> None:
        """Runs the recording's work without its questions; what it computes is of no use."""
        self._rehearsing = True
        try:
            run()
        finally:
            self._rehearsing = False

    def forget_rehearsal(self) -> None:
        self.wrong.zero_()
        self.uses_there.copy_(torch.from_numpy(self._counted))

    # -- around a launch ----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Brings the table up to date, before a launch; the device must be idle."""
        stream = self.machine.compute()
        if self._calls_seen != self.engine.calls:
            self._calls_seen = self.engine.calls
            if self.lanes is not None:
                self.lanes.flush()
                self._fill_whole_layers()
            slots: list[Slot] | None = self.residency.read()
        else:
            slots = self.residency.advance()
        if slots is None:
            return
        begin_reading(slots, stream)
        self.slots_there.copy_(self.table, non_blocking=True)

    def serve(self) -> None:
        """Computes the CPU's experts of all layers, as the device asks for them."""
        native.check(native.library().gs_serve(byref(self._args)))

    def finish(self) -> bool:
        """After a step, with the device idle: begins copies for later steps. Returns whether all numbers are finite."""
        self.steps += 1
        if self.asks and self.lanes is not None:
            computed = sum(layer.computed for layer in self._layers)
            copies = self.residency.choose(self.uses.numpy(), computed - self._on_cpu)
            self._on_cpu = computed
            for row, expert, slot in copies:
                fill([slot], self.layers[row], [expert], self.machine.copies, self.lanes._copied)
                self.engine.tally(self.layers[row]).uploads += 1
        fine = not int(self.wrong.numpy()[0])
        self.wrong.numpy()[0] = 0
        return fine

    def settle(self) -> None:
        """Adds what the steps have counted to the engine's counters."""
        uses = self.uses_there.cpu().numpy().astype(np.int64) - self._counted
        self._counted += uses
        for row, layer in enumerate(self.layers):
            tally, routes = self.engine.tally(layer), int(uses[row].sum())
            computed, seconds = 0, 0.0
            if self.asks:
                served = self._layers[row]
                computed, seconds = served.computed - int(self._cpu_counted[row]), served.seconds
                self._cpu_counted[row], served.seconds = served.computed, 0.0
            tally.calls += self.steps
            tally.tokens += self.steps * len(self.place)
            tally.experts_cpu += computed
            tally.experts_cached += routes - computed
            tally.bytes_store_read += computed * self.store.expert_nbytes(layer)
            tally.t_cpu += seconds
            if not self.asks:
                self.engine.caches[layer].add_uses(uses[row][: self.store.num_experts(layer)].tolist())
        self.steps = 0

    def close(self) -> None:
        if self.lanes is None:
            self.machine.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _whole(self) -> bool:
        """Whether the device has room for every expert."""
        engine = self.engine
        if self.lanes is None or engine.settings.lanes not in ("auto", "cached"):
            return False
        if engine.settings.cache not in ("lru", "lfu"):
            return False
        return all(engine.caches[layer].capacity >= self.store.num_experts(layer) for layer in self.layers)

    def _fill_whole_layers(self) -> None:
        """Copies what is missing to the device, if it has room for every expert."""
        if self.asks:
            return
        for layer in self.layers:
            cache = self.engine.caches[layer]
            missing = [e for e in range(self.store.num_experts(layer)) if e not in cache]
            slots = [cache.force(e, ()) for e in missing]
            filled = [slot for slot in slots if slot is not None]
            if filled:
                fill(filled, layer, missing, self.machine.copies, self.lanes._copied)

    def _base(self) -> Any:
        """The slots as experts; None if the device has none."""
        ring = None if self.lanes is None or self.engine.settings.lanes == "cpu" else self.lanes.ring
        return None if ring is None else ring.slots[0].arena.base

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in pinned memory."""
        size = int(np.prod(shape)) * dtype.itemsize
        return self.machine.host(size)[:size].view(dtype).view(shape).zero_()

    def _prepare_serving(self) -> None:
        engine, store = self.engine, self.store
        int8 = int8_group(store, engine.settings.compute) if self.lanes is None else 0
        self._kernels = Kernels(store.options, 0, int8)
        self._calls = [
            self._kernels.call(self.x_here, self.ids, store.experts(layer), self.rows_here, self.flags)
            for layer in self.layers
        ]
        size, work = store.expert_nbytes(self.layers[0]), 6 * store.hidden_size * store.intermediate_size
        counts = [min(engine.threads, busy(size * n, work * n)) for n in range(self.routes + 1)]
        self._threads = torch.tensor(counts, dtype=torch.int32, device="cpu")
        self._layers = (ServedLayer * len(self.layers))()
        for row, (served, call) in enumerate(zip(self._layers, self._calls, strict=True)):
            served.experts = cast(addressof(call.args), POINTER(MoeArgs))
            served.slots, served.uses = self.table[row].data_ptr(), self.uses[row].data_ptr()
        self._args = ServeArgs(
            layers=self._layers, layer_count=len(self.layers), routes=self.routes, routed=self.routed.data_ptr(),
            ids=self.ids.data_ptr(), threads=self._threads.data_ptr(), asked=self.words.data_ptr(),
            answered=self.words[16:].data_ptr(), patience=PATIENCE, polite=int(self.machine.device.type == "cpu"),
        )  # fmt: skip


def _inner(dtype: torch.dtype) -> torch.dtype:
    """The dtype of h on a device, as in `experts._kernels.panels`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
