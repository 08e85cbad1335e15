"""The experts of a recorded step: the device computes those that it holds, the CPU the rest, and the device waits.

For each layer the device sends its tokens and their experts to host memory and sets a word. The CPU, in `serve`,
waits for the word, computes the experts that the table of slots does not have, and sets another word, for which the
device waits before it adds the rows. If the device holds every expert, it asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine import Engine
from ..lanes.kernels import kernel_dtype, kernel_module
from ..memory.machine import CudaMachine
from ..memory.slots import Slot, begin_reading, fill
from .residency import Residency


class GraphExperts:
    """y [T, H] = the experts of x for T tokens of k experts each, as a part of a recording

    serving   the CPU's part, which must follow every launch of the recording; None if the device holds every expert
    lora      of the engine's adapters when this was made; with others it must be made anew
    """

    def __init__(self, engine: Engine, tokens: int, k: int, dtype: torch.dtype) -> None:
        lanes, store = engine.device_lanes, engine.store
        self.engine, self.store, self.lanes = engine, store, lanes
        self.machine: Any = CudaMachine(None, engine.device) if lanes is None else lanes.machine
        self.layers, self.tokens = store.layers, tokens
        self._row_of = {layer: row for row, layer in enumerate(self.layers)}
        self._rehearsing, self._calls_seen, self._on_cpu, self._steps = False, -1, 0, 0
        wide = max(store.num_experts(layer) for layer in self.layers)
        routes, inner = tokens * k, store.intermediate_size
        self._allocate(tokens, k, dtype, wide)
        with torch.inference_mode(False):
            on: dict[str, Any] = {"device": self.machine.device}
            self.slots_there = torch.full((len(self.layers), wide), -1, dtype=torch.int32, **on)
            self.uses_there = torch.zeros(len(self.layers), wide, dtype=torch.int32, **on)
            self.rows = torch.zeros(2 * routes, store.hidden_size, dtype=torch.float32, **on)
            # a tile without rows reads the element before its first one
            h = torch.zeros((routes + 1) * inner, dtype=_inner(dtype), **on)
            self._h = h[inner:]
            token_of = torch.zeros(routes + 1, dtype=torch.int32, **on)
            token_of[1:] = torch.arange(routes, dtype=torch.int32, **on) // k
            self._token_of = token_of[1:]
            self._tiles = torch.zeros(4, routes, dtype=torch.int32, **on)
            self._tiles[1] = torch.arange(routes, dtype=torch.int32, **on)
            self._place = torch.zeros(tokens, k, dtype=torch.int32, **on)
            self.lora = engine.adapters.lora
            self._factors = self._factors_of(routes)
        # with lanes="cpu" the device computes no expert, so it is sent none
        costs = getattr(engine.calibration, "costs", None) if self._base() is not None else None
        self.residency = Residency(self.layers, engine.caches, self.table.numpy(), costs)
        self._counted = np.zeros((len(self.layers), wide), dtype=np.int64)
        self.serving = None
        if not self._whole():
            from ._native_serving import Serving

            self.serving = Serving(
                engine, self._x_here, self._routed, self._rows_here, self.table, self._words,
                polite=self.machine.device.type == "cpu",
            )  # fmt: skip

    def _allocate(self, tokens: int, k: int, dtype: torch.dtype, wide: int) -> None:
        """Pinned memory."""
        hidden = self.store.hidden_size
        with torch.inference_mode(False):
            self.table = self.host((len(self.layers), wide), torch.int32).fill_(-1)
            self.wrong = self.host((1,), torch.int32)
            self._words = self.host((32,), torch.int32)  # question and answer, on different lines of the cache
            self._x_here = self.host((tokens, hidden), kernel_dtype(dtype))
            self._routed = self.host((tokens, k), torch.int64)
            self._rows_here = self.host((tokens * k, hidden), torch.float32)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in pinned memory."""
        size = int(np.prod(shape)) * dtype.itemsize
        memory: Tensor = self.machine.host(size)
        return memory[:size].view(dtype).view(shape).zero_()

    # -- within a recording -------------------------------------------------------------------------------------------

    def call(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Launches the work of one layer: x [T, H], ids and weights [T, k] -> y [T, H] in x's dtype."""
        row, stream, kernels = self._row_of[layer], self.machine.compute(), kernel_module("offload.lanes._triton")
        x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.contiguous()
        experts, routes = self.store.num_experts(layer), ids.numel()
        asks = self.serving is not None
        if asks:
            inner = x.to(self._x_here.dtype)
            kernels.fetch(inner.view(1, -1), ids.view(1, -1), self._x_here.view(1, -1), self._routed.view(1, -1))
            if not self._rehearsing:
                self.machine.write_word(self._words[:1], 1, stream)
        slots, uses = self.slots_there[row, :experts], self.uses_there[row, :experts]
        locate = kernel_module("offload.decoding._triton").locate
        locate(ids, slots, self._tiles, self._place, uses, self.wrong)
        base = self._base()
        if base is not None:
            self._on_device(x, base, self._factors.get(layer), self.rows[routes:])
        if asks and not self._rehearsing:
            self.machine.wait_for_word(self._words[16:17], 1, stream)
            self.machine.write_word(self._words[16:17], 0, stream)
        fetched = self._rows_here if asks else None
        out, merge = kernels.merger(self.rows, self._place, weights, x.dtype, self.wrong, fetched)
        merge()
        result: Tensor = out
        return result

    def _on_device(self, x: Tensor, base: Any, factors: Any, rows: Tensor) -> None:
        """The rows of the experts that have slots."""
        extra = None if factors is None else factors.extra_of(x, self._token_of, self._tiles, 1)
        kernel_module("experts._kernels.vectors").forward(
            x, self._token_of, self._tiles, base, extra, self._h, rows, 1, **self.store.options
        )
        if factors is not None:
            factors.add_to(self._h, self._tiles, rows, self.store.intermediate_size, 1)

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
        slots: list[Slot] | None
        if self._calls_seen != self.engine.calls:  # a prompt may have changed the caches
            self._calls_seen = self.engine.calls
            if self.lanes is not None:
                self.lanes.flush()
                self._fill_whole_layers()
            slots = self.residency.read()
        else:
            slots = self.residency.advance()
        if slots is None:
            return
        begin_reading(slots, stream)
        self.slots_there.copy_(self.table, non_blocking=True)

    def finish(self) -> bool:
        """After a step, with the device idle: begins copies for later steps. Returns whether all numbers are finite."""
        self._steps += 1
        serving, lanes = self.serving, self.lanes
        if serving is not None and lanes is not None:
            on_cpu, self._on_cpu = serving.computed - self._on_cpu, serving.computed
            for row, expert, slot in self.residency.choose(serving.uses.numpy(), on_cpu):
                fill([slot], self.layers[row], [expert], self.machine.copies, lanes.copy_experts)
                self.engine.tally(self.layers[row]).uploads += 1
        wrong = self.wrong.numpy()
        fine = not wrong[0]
        wrong[0] = 0
        return fine

    def settle(self) -> None:
        """Adds what the steps have counted to the engine's counters."""
        uses = self.uses_there.cpu().numpy().astype(np.int64) - self._counted
        self._counted += uses
        for row, layer in enumerate(self.layers):
            tally, routes = self.engine.tally(layer), int(uses[row].sum())
            computed, seconds = (0, 0.0) if self.serving is None else self.serving.take(row)
            tally.calls += self._steps
            tally.tokens += self._steps * self.tokens
            tally.experts_cpu += computed
            tally.experts_cached += routes - computed
            tally.bytes_store_read += computed * self.store.expert_nbytes(layer)
            tally.t_cpu += seconds
            if self.serving is None or self.lanes is None:
                self.engine.caches[layer].add_uses(uses[row][: self.store.num_experts(layer)].tolist())
        self._steps = 0

    def close(self) -> None:
        if self.lanes is None:
            self.machine.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _whole(self) -> bool:
        """Whether the device has room for every expert."""
        engine = self.engine
        if self.lanes is None or engine.settings.lanes != "auto" or engine.settings.cache not in ("lru", "lfu"):
            return False
        return all(engine.caches[layer].capacity >= self.store.num_experts(layer) for layer in self.layers)

    def _fill_whole_layers(self) -> None:
        """Copies what is missing to the device, if it has room for every expert."""
        if self.serving is not None or self.lanes is None:
            return
        for layer in self.layers:
            cache = self.engine.caches[layer]
            missing = [e for e in range(self.store.num_experts(layer)) if e not in cache]
            slots = [slot for slot in (cache.force(e, ()) for e in missing) if slot is not None]
            if slots:
                fill(slots, layer, missing, self.machine.copies, self.lanes.copy_experts)

    def _factors_of(self, routes: int) -> dict[int, Any]:
        """The LoRA of each layer on the device, with workspaces in which a tile without rows may read one row before"""
        panels = {layer: self.lora.on_device(layer) for layer in self.layers}
        there = {layer: one for layer, one in panels.items() if one is not None}
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.machine.device}
        low = torch.zeros(routes * max((one.rank for one in there.values()), default=0), **options)
        wide = 2 * self.store.intermediate_size
        extra = torch.zeros((routes + 1) * wide if there else wide, **options)[wide:]
        return {layer: one.with_workspaces(low, extra) for layer, one in there.items()}

    def _base(self) -> Any:
        """The slots as experts; None if the device has none."""
        ring = None if self.lanes is None or self.engine.settings.lanes == "cpu" else self.lanes.ring
        return None if ring is None else ring.slots[0].arena.base


def _inner(dtype: torch.dtype) -> torch.dtype:
    """The dtype of h on a device, as in `experts._kernels.panels`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
