"""The CPU's lane beside a GPU: one call of the experts' kernels at a time, while the caller's thread goes on.

The native library has a thread for that, which knows nothing of Python and its lock; where there is no library, a
thread of Python does.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from ctypes import byref, c_double, c_void_p
from typing import Any

from torch import Tensor

from ..core import native
from ..experts import PackedExperts
from .kernel import Kernels
from .streams import Worker


class Lane:
    """begin(...), then end(), in turn. `close` ends the thread, and may be called twice."""

    def __init__(self, options: Mapping[str, Any], threads: int) -> None:
        self._kernels = Kernels(options, threads)
        self._times = (c_double * 2)()
        self._worker: Worker | None = None
        self._native = _made() if native.reason() is None else None
        if self._native is None:
            self._worker = Worker("goldsmith CPU lane")
        else:
            self._finalizer = weakref.finalize(self, _freed, self._native, os.getpid())
            self._finalizer.atexit = False
        self._busy: Any = None

    def begin(self, x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor) -> None:
        """Begins what Kernels.rows does, with arguments that stay as they are until `end`."""
        self.abandon()
        if self._worker is not None:
            self._worker.run(lambda: self._timed(x, ids, base, rows, flags))
            self._busy = self._worker.record()
            return
        call = self._kernels.call(x, ids, base, rows, flags)
        native.check(native.library().gs_lane_begin(self._native, byref(call.args)))
        self._busy = call, x, ids, base, rows, flags  # what the library's thread reads is there until the end

    def end(self) -> tuple[float, float]:
        """Waits; when the kernel began and ended, of time.perf_counter(). Raises what went wrong in it."""
        busy, self._busy = self._busy, None
        if self._worker is not None:
            busy.synchronize()
        else:
            native.check(native.library().gs_lane_end(self._native, self._times))
        return self._times[0], self._times[1]

    def close(self) -> None:
        self.abandon()
        if self._worker is not None:
            self._worker.close()
        else:
            self._finalizer()

    def abandon(self) -> None:
        """Waits for a call that was begun and given up, if there is one; its error is nobody's."""
        if self._busy is None:
            return
        try:
            self.end()
        except (ValueError, RuntimeError, MemoryError):
            pass

    def _timed(self, x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor) -> None:
        self._times[0] = time.perf_counter()
        self._kernels.rows(x, ids, base, rows, flags)
        self._times[1] = time.perf_counter()


def _made() -> c_void_p | None:
    library = native.library()
    if not hasattr(library, "gs_lane_new"):
        return None
    library.gs_lane_new.argtypes = [c_void_p]
    library.gs_lane_begin.argtypes = library.gs_lane_end.argtypes = [c_void_p, c_void_p]
    library.gs_lane_free.argtypes, library.gs_lane_free.restype = [c_void_p], None
    found = c_void_p()
    native.check(library.gs_lane_new(byref(found)))
    return found


def _freed(lane: c_void_p, made_in: int) -> None:
    if os.getpid() == made_in:  # a forked child does not have the thread
        native.library().gs_lane_free(lane)
