"""LateWrites: results and inputs of plain calls, looked at again when a candidate's last request has come.

Threads that wait for nothing but a signal of another thread, such as idle ones of a pool, cannot write by themselves.
Where a thread or a process of the candidate can, the look is late.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
import threading
import time

import torch

from ...execute.records import PlainResults, Watched
from ...judge.agreement import same_bits
from ...support.threads import running_threads
from .limits import children

LATE = 1.3  # seconds after the last call
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine(), "")
_BYTES = 64 << 20


class LateWrites:
    """What plain calls left, beside copies of it."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self.bytes, self.since = 0, 0.0

    def keep(self, results: PlainResults) -> None:
        self.since = time.monotonic()
        for watched in results.watched:
            self.bytes += 2 * watched.tensor.numel() * watched.tensor.element_size()
            if self.bytes > _BYTES:
                return
            self.watched.append(watched)

    def found(self) -> list[str]:
        """Sentences about what has changed; waits where something runs that can still write."""
        gc.collect()  # a finalizer or a callback of the collector may write
        until = self.since + LATE
        while self.watched and time.monotonic() < until and not self._changed() and can_write():
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))
        return [f"{watched.name} changed after the call had returned" for watched in self._changed()]

    def _changed(self) -> list[Watched]:
        return [w for w in self.watched if not same_bits(w.tensor.detach(), w.copy)]


def can_write() -> bool:
    """Whether a process was forked and lives, or a thread other than this one runs or wakes up by itself."""
    if children(os.getpid()):
        return True
    if sys.platform != "linux" or not _FUTEX or torch.cuda.is_initialized():  # a driver has threads of its own
        return running_threads() > 0
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        return any(_wakes(thread) for thread in os.listdir("/proc/self/task") if thread != own)
    return running_threads() > 0


def _wakes(thread: str) -> bool:
    """Whether a thread does anything but wait, without a limit of time, for a signal of another thread."""
    try:
        with open(f"/proc/self/task/{thread}/syscall") as file:
            call = file.read().split()
    except FileNotFoundError:  # it has ended
        return False
    return len(call) < 5 or call[0] != _FUTEX or call[4] != "0x0"
