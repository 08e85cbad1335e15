"""Costs: what moving and computing experts takes on a machine, in seconds, bytes and floating-point operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

_RATES = (
    "cpu_bytes_per_s", "cpu_flops", "link_bytes_per_s", "dram_bytes_per_s", "device_bytes_per_s", "device_flops",
)  # fmt: skip
_OP = "offload.Costs"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """An expert of S = expert_bytes bytes takes max(S / bytes_per_s, n f / flops) for n tokens of f = flops_per_token

    cpu_bytes_per_s, cpu_flops        the CPU's kernel, all its threads: weights read, work done
    link_bytes_per_s                  a copy of one expert to the device
    dram_bytes_per_s                  what the CPU's kernel and copies read together of one memory
    device_bytes_per_s, device_flops  the device's kernel
    cpu_latency, link_latency, device_latency    what a call takes beside its experts, where that lane decides
    split_latency    what a call takes at least that has experts both on the CPU and on the device: one of each
    shared           the device is the CPU itself (device="cpu"): its experts come after the CPU's, not beside them

    Rates are above 0 and may be infinite, the rest is at least 0: ValueError otherwise, TypeError for no number.
    """

    expert_bytes: float
    flops_per_token: float
    cpu_bytes_per_s: float
    cpu_flops: float
    link_bytes_per_s: float
    dram_bytes_per_s: float
    device_bytes_per_s: float
    device_flops: float
    cpu_latency: float
    link_latency: float
    device_latency: float
    split_latency: float = 0.0
    shared: bool = False
    _hash: ClassVar[int]

    def __hash__(self) -> int:
        return self._hash  # a plan is looked up by it at every call

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "shared":
                if not isinstance(value, bool):
                    raise TypeError(f"{_OP}: shared={value!r}, wanted True or False")
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{_OP}: {name}={value!r} is of type {type(value).__name__}, wanted a number")
            if name in _RATES:
                if not value > 0:
                    raise ValueError(f"{_OP}: {name}={value!r}, wanted a rate above 0")
            elif not 0 <= value < math.inf:
                raise ValueError(f"{_OP}: {name}={value!r}, wanted a finite number of at least 0")
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))
