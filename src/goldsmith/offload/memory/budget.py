"""The division of the device's memory budget: staging slots, cache slots, arenas and workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..settings import EngineSettings

STAGING = 8  # most staging slots; half are filled while the other half is read
SPARE = 4 << 20  # on a GPU: lists of routes, and what torch's allocator rounds up
_ROWS = (32768, 64)  # largest and smallest workspace on a GPU


@dataclass(frozen=True)
class Spending:
    """Bytes of device memory by purpose, `total` in all; `why_off` is the reason if there is no device lane.

    staging   slots through which experts are copied
    cache     slots of each layer
    arenas    2 when whole layers are streamed while the next one is copied, otherwise 0; `arena` bytes each
    rows      most routes of a call at a time, each `row_bytes`; 0: no limit, not on the device
    adapters  bytes for the factors of adapters
    """

    budget: int
    slot_bytes: int
    staging: int = 0
    cache: Mapping[int, int] = field(default_factory=dict)
    arenas: int = 0
    arena: int = 0
    rows: int = 0
    row_bytes: int = 0
    adapters: int = 0
    why_off: str = ""

    @property
    def total(self) -> int:
        slots = self.staging + sum(self.cache.values())
        spare = SPARE if self.rows else 0
        return slots * self.slot_bytes + self.arenas * self.arena + self.rows * self.row_bytes + spare + self.adapters

    @property
    def device_lane(self) -> bool:
        return self.staging > 0

    def to_dict(self) -> dict[str, object]:
        cache = {str(layer): count for layer, count in self.cache.items()}
        return asdict(self) | {"cache": cache, "total": self.total}


def spend(
    budget: int, settings: EngineSettings, slot_bytes: int, experts: Mapping[int, int], row_bytes: int = 0,
    adapters: int = 0,
) -> Spending:  # fmt: skip
    """Divides the budget: adapters and staging first, then the workspace (row_bytes > 0: a GPU), the arenas of prefill,
    and the cache.

    Fewer than two slots count as none. Arenas get at most half of what remains, unless prefill="stream" demands them.
    """
    off = {layer: 0 for layer in experts}
    most = max(experts.values())
    rows = 0
    left = budget - adapters
    if row_bytes:
        # so that a budget of exactly the minimum suffices
        rows_with_two_slots = (left - SPARE - 2 * slot_bytes) // row_bytes
        rows = max(_ROWS[1], min(_ROWS[0], left // 4 // row_bytes, rows_with_two_slots))
        left -= rows * row_bytes + SPARE
    if left < 2 * slot_bytes:
        need = adapters + 2 * slot_bytes + (_ROWS[1] * row_bytes + SPARE if row_bytes else 0)
        reason = "gpu_budget=0" if budget == 0 else f"gpu_budget={budget} bytes are too little for two slots"
        beside = " beside the adapters" if adapters else ""
        why = f"{reason}: everything is computed on the CPU (two slots{beside} need {need} bytes)"
        if budget == 0 and settings.gpu_budget is None:
            why = "no GPU is used, and gpu_budget='auto' takes no memory without one: everything is computed on the CPU"
        return Spending(budget, slot_bytes, 0, off, why_off=why)
    slots = left // slot_bytes
    staging = min(STAGING, max(2, slots // 4), 2 * most)
    slots -= staging
    arena, arenas = most * slot_bytes, 0
    wanted = settings.prefill != "cpu" and settings.lanes == "auto" and len(experts) > 1
    if wanted and 2 * most <= (slots if settings.prefill == "stream" else slots // 2):
        arenas, slots = 2, slots - 2 * most
    cache = off
    if settings.cache != "none" or settings.lanes in ("cached", "mixed"):
        cache = _share_slots(slots, experts)
    if settings.lanes in ("cached", "mixed"):
        cache = _at_least_one(cache, slots, staging)
    return Spending(budget, slot_bytes, staging, cache, arenas, arena * bool(arenas), rows, row_bytes, adapters)


def _share_slots(slots: int, experts: Mapping[int, int]) -> dict[int, int]:
    """An equal number of slots for each layer; slots that a layer with few experts cannot use go to the others."""
    slots_of: dict[int, int] = {}
    while len(slots_of) < len(experts):
        layers = [layer for layer in sorted(experts) if layer not in slots_of]
        per_layer, remainder = divmod(slots, len(layers))
        whole = {layer: experts[layer] for layer in layers if experts[layer] <= per_layer}
        if not whole:
            return slots_of | {layer: per_layer + (i < remainder) for i, layer in enumerate(layers)}
        slots_of |= whole
        slots -= sum(whole.values())
    return slots_of


def _at_least_one(cache: Mapping[int, int], slots: int, staging: int) -> dict[int, int]:
    """`cache` as a dict. Raises ValueError if some layer has no slot, because a forced lane needs one in each."""
    if all(cache.values()):
        return dict(cache)
    raise ValueError(
        f"offload.Engine: the lane 'cached' needs a slot in each of {len(cache)} layers and {staging} for copies, "
        f"but gpu_budget leaves {slots} for layers; raise gpu_budget"
    )
