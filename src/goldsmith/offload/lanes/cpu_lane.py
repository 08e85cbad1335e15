"""The CPU's lane beside a GPU: one call of the experts' kernels at a time, while the caller's thread goes on.

The native library has a thread for that, which knows nothing of Python and its lock; where there is no library, a
thread of Python does.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from ctypes import byref, c_double, c_int32, c_uint32, c_void_p
from typing import Any

from torch import Tensor

from ...core import native
from ...experts import PackedExperts
from ..memory.streams import Worker
from .kernels import Kernels


class Lane:
    """begin(...), then end(), in turn. `close` ends the thread, and may be called twice.

    word    int32 [1], for a GPU that is to wait for a call: the thread sets it to `number`, which counts the calls that
            were begun, as soon as one is over. None: nobody does
    tells   whether the thread does so; one of Python's does not
    """

    def __init__(self, options: Mapping[str, Any], threads: int, word: Tensor | None = None) -> None:
        self._kernels, self._threads = Kernels(options, threads), threads
        self._word, self.number = word, 0
        self._times = (c_double * 2)()
        self._worker: Worker | None = None
        self._native = _made() if native.reason() is None else None
        if self._native is None:
            self._worker = Worker("goldsmith CPU lane")
        else:
            # at the program's end, too: what a call reads must not go before it is over
            self._finalizer = weakref.finalize(self, _freed, self._native, os.getpid())
        self._busy: Any = None
        self.tells = self._native is not None and word is not None

    def ready(self) -> None:
        """A call is about to be begun: whoever works on it is woken now, and not then."""
        if self._native is not None:
            native.library().gs_lane_ready(self._native, self._threads)

    def begin(self, x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor) -> None:
        """Begins what Kernels.rows does, with arguments that stay as they are until `end`."""
        self.abandon()
        self.number += 1
        if self._worker is not None:
            self._worker.run(lambda: self._timed(x, ids, base, rows, flags))
            self._busy = self._worker.record()
            return
        call = self._kernels.call(x, ids, base, rows, flags)
        word = None if self._word is None else self._word.data_ptr()
        self._busy = call, x, ids, base, rows, flags  # what the library's thread reads is there until the end
        status = native.library().gs_lane_begin(self._native, byref(call.args), word, self.number & 0xFFFFFFFF)
        if status:
            self._busy = None
            native.check(status)

    def end(self) -> tuple[float, float]:
        """Waits; when the kernel began and ended, of time.perf_counter(). Raises what went wrong in it."""
        if self._busy is None:
            raise RuntimeError("offload.Engine: no call was begun on the CPU's lane")
        if self._worker is not None:
            try:
                self._busy.synchronize()
            except Exception:  # of the call; Ctrl-C leaves it under way
                self._busy = None
                raise
            self._busy = None
            return self._times[0], self._times[1]
        status = native.library().gs_lane_end(self._native, self._times)
        self._busy = None  # now, and not before: after Ctrl-C somebody must wait for it still
        native.check(status)
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
    if not hasattr(library, "gs_lane_ready"):  # an older one
        return None
    library.gs_lane_new.argtypes = [c_void_p]
    library.gs_lane_begin.argtypes = [c_void_p, c_void_p, c_void_p, c_uint32]
    library.gs_lane_ready.argtypes, library.gs_lane_end.argtypes = [c_void_p, c_int32], [c_void_p, c_void_p]
    library.gs_lane_free.argtypes, library.gs_lane_free.restype = [c_void_p], None
    found = c_void_p()
    native.check(library.gs_lane_new(byref(found)))
    return found


def _freed(lane: c_void_p, made_in: int) -> None:
    if os.getpid() == made_in:  # a forked child does not have the thread
        native.library().gs_lane_free(lane)
