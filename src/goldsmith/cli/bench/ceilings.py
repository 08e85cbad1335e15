"""Rates that this machine reaches, measured in the same run, and the least time of a call at these rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...core import native
from .subject import Subject
from .timing import CpuClock, CudaClock

PRODUCTS = {torch.float32: ("fma",), torch.bfloat16: ("fma", "dot_bf16", "amx_bf16")}
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LEAST_MEGABYTES = 512


@dataclass(frozen=True)
class Ceiling:
    """Rates in bytes and FLOPs per microsecond.

    memory    "copy" (bytes read and written), or "read" where FLOPs are counted too
    product   the instruction with most FLOPs in this dtype
    """

    memory: str
    bytes_rate: float
    product: str = ""
    flop_rate: float = 0.0

    def floor(self, moved: int | None, flop: int | None) -> tuple[float | None, str]:
        """The least time in microseconds, and the name of the ceiling that sets it."""
        least: dict[str, float] = {}
        if moved is not None:
            least[self.memory] = moved / self.bytes_rate
        if flop is not None and self.flop_rate:
            least[self.product] = flop / self.flop_rate
        slowest = max(least, key=lambda name: least[name], default="")
        return least.get(slowest), slowest


@dataclass
class Ceilings:
    """Ceilings, measured on first use: the copy rate before each subject, other rates once per thread count."""

    clock: CudaClock | CpuClock
    known: dict[tuple[str, int], float] = field(default_factory=dict)

    def of(self, subject: Subject, threads: int | None) -> Ceiling:
        if threads is None or subject.entry.forward_flop is None or native.reason() is not None:
            return Ceiling("copy", self.clock.copy_rate())
        rates = {name: self._rate(name, threads) for name in subject.entry.products or PRODUCTS[subject.entry.dtype]}
        best = max(rates, key=lambda name: rates[name])
        return Ceiling("read", self._rate("read", threads), best, rates[best])

    def _rate(self, name: str, threads: int) -> float:
        """Per microsecond, the better of two measurements; 0 for an instruction that this CPU lacks."""
        key = name, threads
        if key not in self.known:
            self.known[key] = max(self._measured(name, threads) for _ in range(2))
        return self.known[key]

    def _measured(self, name: str, threads: int) -> float:
        try:
            return native.measure(name, threads=threads, seconds=0.1, megabytes=megabytes_beyond_caches()) / 1e6
        except native.BackendUnavailable:
            return 0.0


def megabytes_beyond_caches() -> int:
    """Megabytes to read, so that caches do not help: four times the largest one."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    kib = [int(size[:-1]) for size in sizes if size.endswith("K")]
    return max([LEAST_MEGABYTES, *(4 * k // 1024 for k in kib)])
