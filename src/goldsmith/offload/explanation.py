"""What the engine is, in words and numbers: the budget, the lanes, the costs, what limits, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Explanation:
    """`str()` is a paragraph a point; `to_dict()` the same for machines."""

    lines: tuple[str, ...]
    facts: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.facts)


def explain(engine: Engine) -> Explanation:
    spending, settings, store = engine.spending, engine.settings, engine.store
    facts: dict[str, Any] = {
        "device": str(engine.device), "threads": engine.threads, "format": store.format, "lanes": settings.lanes,
        "cache": settings.cache, "prefill": settings.prefill, "budget": spending.to_dict(),
    }  # fmt: skip
    lines = [f"store: {store!r}", f"CPU lane: {engine.threads} threads, experts where they are mapped"]
    if spending.device_lane:
        slots = sum(spending.cache.values())
        lines.append(
            f"budget: {spending.total} of {spending.budget} bytes on {engine.device}: {spending.staging} slots for "
            f"copies, {slots} in the cache ({settings.cache}), {spending.arenas} arenas of {spending.arena} bytes"
        )
    else:
        lines.append(f"device lane off: {spending.why_off}")
    return Explanation(tuple(lines), facts)
