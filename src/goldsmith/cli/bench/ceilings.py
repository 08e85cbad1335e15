"""What the machine reaches, measured in the same run: the time that a call must at least take."""

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
    """Rates in bytes and FLOPs a microsecond; `product` names the fastest instruction of the dtype.

    memory is "copy" (bytes read and written) or, where products are counted too, "read".
    """

    memory: str
    bytes_rate: float
    product: str = ""
    flop_rate: float = 0.0

    def floor(self, moved: int | None, flop: int | None) -> tuple[float | None, str]:
        """The least time in microseconds, and which ceiling it comes from."""
        least: dict[str, float] = {}
        if moved is not None:
            least[self.memory] = moved / self.bytes_rate
        if flop is not None and self.flop_rate:
            least[self.product] = flop / self.flop_rate
        slowest = max(least, key=lambda name: least[name], default="")
        return least.get(slowest), slowest


@dataclass
class Ceilings:
    """Measured when they are first needed: the copy rate before each subject, the others once for each thread count."""

    clock: CudaClock | CpuClock
    known: dict[tuple[str, int], float] = field(default_factory=dict)

    def of(self, subject: Subject, threads: int | None) -> Ceiling:
        if threads is None or subject.entry.forward_flop is None or native.reason() is not None:
            return Ceiling("copy", self.clock.copy_rate())
        rates = {what: self._rate(what, threads) for what in subject.entry.products or PRODUCTS[subject.entry.dtype]}
        best = max(rates, key=lambda what: rates[what])
        return Ceiling("read", self._rate("read", threads), best, rates[best])

    def _rate(self, what: str, threads: int) -> float:
        """A microsecond; 0 for an instruction that is missing. The better of two: the host may look away."""
        key = what, threads
        if key not in self.known:
            self.known[key] = max(self._measured(what, threads) for _ in range(2))
        return self.known[key]

    def _measured(self, what: str, threads: int) -> float:
        try:
            return native.measure(what, threads=threads, seconds=0.1, megabytes=megabytes_beyond_caches()) / 1e6
        except native.BackendUnavailable:
            return 0.0


def megabytes_beyond_caches() -> int:
    """Megabytes to read through: four times the largest cache."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    kib = [int(size[:-1]) for size in sizes if size.endswith("K")]
    return max([LEAST_MEGABYTES, *(4 * k // 1024 for k in kib)])
