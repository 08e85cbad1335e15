"""Types of JSON objects that commands print and send to their workers."""

from __future__ import annotations

from typing import TypedDict

JsonObject = dict[str, object]


class GpuFacts(TypedDict):
    name: str
    capability: str
    memory_gib: float
    multiprocessors: int
    l2_mib: float


class MachineFacts(TypedDict):
    """`core.device.Machine` as JSON."""

    cpu: str
    isa: list[str]
    cores: int
    memory_gib: float
    python: str
    torch: str
    triton: str | None
    interpreter: bool
    gpus: list[GpuFacts]
