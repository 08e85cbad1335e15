"""Rows of `python -m benchmarks.offload`: each figure with its conditions, and its share of two predictions."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.rows import RunRow

PACKAGES = ("accelerate",)


@dataclass(frozen=True)
class OffloadRow(RunRow):
    """One timing of one way to compute a case, or figures of a case (as of op "offload.memory").

    op        offload.calls: one call of the experts, layers in turn; offload.step: a forward of the model's layers;
              offload.guard: calls with the guard, `ratio` over calls without; offload.memory: bytes and seconds;
              offload.calibrate: seconds of measuring this machine
    bound_us  the plan's prediction from calibrated costs; hardware_us: from the rates at which this machine reads
              memory, copies and multiplies. A share is the prediction over the median
    overlap   the busiest lane's time over the whole; cpu, link, device_busy: the share of time that each was busy
    on_cpu, copied, cached   average number of experts of a call in each lane
    """

    op: str
    shape: str
    case: str
    sizes: dict[str, int]
    dtype: str
    format: str
    peer: str
    median_us: float | None = None
    p10: float | None = None
    p90: float | None = None
    runs: int = 0
    hit_rate: float | None = None
    on_cpu: float | None = None
    copied: float | None = None
    cached: float | None = None
    bound_us: float | None = None
    bound_share: float | None = None
    hardware_us: float | None = None
    hardware_share: float | None = None
    limiting: str | None = None
    overlap: float | None = None
    cpu: float | None = None
    link: float | None = None
    device_busy: float | None = None
    ratio: float | None = None
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
