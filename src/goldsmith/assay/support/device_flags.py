"""DeviceFlags: whether something holds of tensors, where all answers that a GPU computes are read with one wait.

A wait costs more than the comparison: processes that share a GPU take turns, and each wait lasts for a turn of every
other one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")
Flag = bool | Tensor  # a Tensor holds one bool


class DeviceFlags(Generic[K]):
    """Flags under keys; `read` waits for those that a GPU computes."""

    def __init__(self) -> None:
        self._flags: dict[K, Flag] = {}

    def add(self, key: K, flag: Flag) -> None:
        self._flags[key] = flag

    def read(self) -> dict[K, bool]:
        waiting = {k: f for k, f in self._flags.items() if isinstance(f, Tensor)}
        for device in {f.device for f in waiting.values()}:
            there = {k: f for k, f in waiting.items() if f.device == device}
            self._flags.update(zip(there, torch.stack(list(there.values())).tolist(), strict=True))
        return {k: bool(f) for k, f in self._flags.items()}


def same_numbers(a: Tensor, b: Tensor) -> Flag:
    """Whether two tensors of one dtype and device have the same shape and numbers; NaN equals NaN."""
    if a.shape != b.shape:
        return False
    if not a.is_cuda and torch.equal(a, b):
        return True
    same = ((a == b) | ((a != a) & (b != b))).all()
    return same if a.is_cuda else bool(same)
