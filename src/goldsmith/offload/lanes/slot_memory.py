"""What an engine allocates, once: arenas for slots, and who holds which of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..memory.budget import Spending, spend
from ..memory.cache import Cache
from ..memory.slots import Arena, Ring
from ..settings import OP, Settings, free_memory
from ..store.expert_store import ExpertStore
from .slot_filling import Streaming


class Memory:
    """The arenas of `spending` on the device, and what is made of them

    ring       slots that copies go through; None where there is no device lane
    streaming  two arenas of a whole layer each, for prompts; None where they found no room
    caches     of every layer, also of those that have no slot
    Raises MemoryError where the device does not have the bytes.
    """

    def __init__(
        self, store: ExpertStore, settings: Settings, spending: Spending, chosen: Mapping[int, list[int]]
    ) -> None:
        self._store, self._spending, self._device = store, spending, settings.device
        count = spending.staging + sum(spending.cache.values())
        with torch.inference_mode(False):  # slots are written in calls outside of it as well
            try:
                self.arenas = [self._arena(count)] if count else []
                streamed = [self._arena(spending.arena // spending.slot_bytes) for _ in range(spending.arenas)]
            except RuntimeError as error:  # torch's own for a GPU, and without a name of its own for the CPU
                raise MemoryError(
                    f"{OP}: {spending.total} bytes could not be had on {self._device}; lower gpu_budget, or free "
                    f"memory there: {error}"
                ) from error
        slots, at = self.arenas[0].slots if count else [], spending.staging
        self.ring = Ring(slots[:at]) if count else None
        self.caches: dict[int, Cache] = {}
        for layer in store.layers:
            size = spending.cache.get(layer, 0)
            held = slots[at : at + size]
            self.caches[layer] = Cache(settings.cache, held, store.num_experts(layer), chosen.get(layer, ()))
            at += size
        self.arenas += streamed
        self.streaming = Streaming(streamed) if streamed else None

    def close(self) -> None:
        """Lets the bytes go; what the caches have counted stays."""
        self.arenas.clear()
        self.ring = self.streaming = None
        for cache in self.caches.values():
            cache.close()

    def _arena(self, slots: int) -> Arena:
        data = torch.empty(slots, self._spending.slot_bytes, dtype=torch.uint8, device=self._device)
        return Arena(data, self._store.blocks.base(data))


def spent(store: ExpertStore, settings: Settings, row_bytes: int) -> Spending:
    """What the budget is spent on; ValueError where a lane is forced that has no room."""
    experts = {layer: store.num_experts(layer) for layer in store.layers}
    block = max(store.expert_nbytes(layer) for layer in store.layers)
    budget = free_memory(settings.device) if settings.gpu_budget is None else settings.gpu_budget
    found = spend(budget, settings, block, experts, row_bytes)
    if settings.lanes in ("copied", "cached", "mixed") and not found.device_lane:
        raise ValueError(f"{OP}: lanes={settings.lanes!r} cannot run: {found.why_off}; raise gpu_budget")
    return found
