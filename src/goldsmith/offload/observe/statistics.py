"""Counters and timings of the lanes: totals and per layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Counts:
    """Counters of one layer, or of all. Seconds and bytes; a rate is None if nothing was counted.

    hits, misses         used experts that were computed from the cache, and the others; summed over calls
    t_cpu t_link t_device t_merge   seconds that a lane was busy; t_wait: the caller waited for lanes; t_wall: whole
                                    calls
    bound                the sum of the plan's predictions, over the calls that had one
    overlap              max(t_cpu, t_link, t_device) / t_wall
    limiting             the lane that limited most of the predicted time
    """

    calls: int = 0
    tokens: int = 0
    prefill_calls: int = 0
    experts_cpu: int = 0
    experts_copied: int = 0
    experts_cached: int = 0
    uploads: int = 0
    evictions: int = 0
    bytes_h2d: int = 0
    bytes_d2h: int = 0
    bytes_store_read: int = 0
    t_cpu: float = 0.0
    t_link: float = 0.0
    t_device: float = 0.0
    t_merge: float = 0.0
    t_wait: float = 0.0
    t_wall: float = 0.0
    bound: float = 0.0
    t_bound: float = field(default=0.0, repr=False)  # the part of t_wall in calls with a prediction
    by_lane: Counter[str] = field(default_factory=Counter, repr=False)  # nanoseconds of `bound` that a lane limited

    @property
    def hits(self) -> int:
        return self.experts_cached

    @property
    def misses(self) -> int:
        return self.experts_cpu + self.experts_copied

    @property
    def hit_rate(self) -> float | None:
        used = self.hits + self.misses
        return self.hits / used if used else None

    @property
    def bound_share(self) -> float | None:
        return self.bound / self.t_bound if self.bound and self.t_bound else None

    @property
    def overlap(self) -> float | None:
        return max(self.t_cpu, self.t_link, self.t_device) / self.t_wall if self.t_wall else None

    @property
    def limiting(self) -> str | None:
        return self.by_lane.most_common(1)[0][0] if self.by_lane else None

    def expect(self, seconds: float, lane: str) -> None:
        """Adds a call's predicted seconds, and the lane that limits it."""
        self.bound += seconds
        self.by_lane[lane] += round(1e9 * seconds)

    def add(self, other: Counts) -> None:
        for f in fields(Counts):
            value = getattr(self, f.name)
            if isinstance(value, Counter):
                value.update(getattr(other, f.name))
            else:
                setattr(self, f.name, value + getattr(other, f.name))

    def to_dict(self) -> dict[str, object]:
        shown = [f.name for f in fields(Counts) if f.repr]
        rates = ("hits", "misses", "hit_rate", "bound_share", "overlap", "limiting")
        return {name: getattr(self, name) for name in (*shown, *rates)}


@dataclass
class Stats(Counts):
    """The totals; `layers` has the counters of each layer that was called."""

    layers: dict[int, Counts] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: dict[int, Counts]) -> Stats:
        stats = cls()
        for layer, counts in layers.items():
            stats.layers[layer] = Counts()
            stats.layers[layer].add(counts)
            stats.add(counts)
        return stats

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | {"layers": {str(layer): counts.to_dict() for layer, counts in self.layers.items()}}
