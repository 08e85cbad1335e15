"""The device memory of an engine, allocated once: arenas, the staging ring, and the caches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..memory.budget import Spending, spend
from ..memory.cache import Cache
from ..memory.slots import SlotArena, SlotRing
from ..settings import OP, EngineSettings, free_memory
from ..store.expert_store import ExpertStore
from .slot_filling import LayerStreaming


class SlotMemory:
    """The arenas of `spending` on the device, and their division

    ring       slots for copies; None without a device lane
    streaming  two arenas of a whole layer each, for prompts; None if they did not fit
    caches     of every layer, even those without a slot
    Raises MemoryError if the device lacks the memory.
    """

    def __init__(
        self, store: ExpertStore, settings: EngineSettings, spending: Spending, chosen: Mapping[int, list[int]]
    ) -> None:
        self._store, self._spending, self._device = store, spending, settings.device
        count = spending.staging + sum(spending.cache.values())
        with torch.inference_mode(False):  # slots are also written in calls outside inference mode
            try:
                self.arenas = [self._arena(count)] if count else []
                streamed = [self._arena(spending.arena // spending.slot_bytes) for _ in range(spending.arenas)]
            except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on the CPU
                raise MemoryError(
                    f"{OP}: {spending.total} bytes could not be allocated on {self._device}; lower gpu_budget, or free "
                    f"memory there: {error}"
                ) from error
        slots, at = self.arenas[0].slots if count else [], spending.staging
        self.ring = SlotRing(slots[:at]) if count else None
        self.caches: dict[int, Cache] = {}
        for layer in store.layers:
            size = spending.cache.get(layer, 0)
            layer_slots = slots[at : at + size]
            self.caches[layer] = Cache(settings.cache, layer_slots, store.num_experts(layer), chosen.get(layer, ()))
            at += size
        self.arenas += streamed
        self.streaming = LayerStreaming(streamed) if streamed else None

    def close(self) -> None:
        """Frees the memory; the caches keep their counts."""
        self.arenas.clear()
        self.ring = self.streaming = None
        for cache in self.caches.values():
            cache.close()

    def _arena(self, slots: int) -> SlotArena:
        data = torch.empty(slots, self._spending.slot_bytes, dtype=torch.uint8, device=self._device)
        return SlotArena(data, self._store.blocks.base(data))


def divided_budget(store: ExpertStore, settings: EngineSettings, row_bytes: int, adapters: int = 0) -> Spending:
    """The division of the budget, with `adapters` bytes for factors. Raises ValueError if a forced lane has no room."""
    experts = {layer: store.num_experts(layer) for layer in store.layers}
    block = max(store.expert_nbytes(layer) for layer in store.layers)
    budget = free_memory(settings.device) if settings.gpu_budget is None else settings.gpu_budget
    spending = spend(budget, settings, block, experts, row_bytes, adapters)
    if settings.lanes in ("copied", "cached", "mixed") and not spending.device_lane:
        raise ValueError(f"{OP}: lanes={settings.lanes!r} cannot run: {spending.why_off}; raise gpu_budget")
    return spending
