"""The CPU lane's thread beside a GPU: computes one call of the experts' kernels while the caller's thread goes on.

The thread belongs to the native library, so it does not need the GIL. Without the library it is a Python thread.
"""

from __future__ import annotations

import os
import time
import weakref
from ctypes import byref, c_double, c_int32, c_uint32, c_void_p
from typing import Any

from torch import Tensor

from ...core import native
from ...experts import PackedExperts
from ..memory.streams import Worker
from ..store.header import ActivationOptions
from .kernels import HostFactors, Kernels


class CpuLane:
    """Runs kernels in a thread: begin(...), then end(), in alternation. `close` ends the thread, and may be called
    twice.

    word    int32 [1] for a GPU that waits for a call: when a call is over, the thread sets it to `number`, which counts
            the calls begun. None: no GPU waits
    signals_stream   whether the thread sets `word`; a Python thread does not
    """

    def __init__(self, options: ActivationOptions, threads: int, word: Tensor | None = None) -> None:
        self._kernels, self._threads = Kernels(options, threads), threads
        self._word, self.number = word, 0
        self._times = (c_double * 2)()
        self._worker: Worker | None = None
        self._native = _native_lane() if native.reason() is None else None
        if self._native is None:
            self._worker = Worker("goldsmith CPU lane")
        else:
            # also at exit: the call's inputs must not be freed before it is over
            self._finalizer = weakref.finalize(self, _free_lane, self._native, os.getpid())
        self._busy: Any = None
        self.signals_stream = self._native is not None and word is not None

    def ready(self) -> None:
        """Wakes the worker threads before the call starts."""
        if self._native is not None:
            native.library().gs_lane_ready(self._native, self._threads)

    def begin(
        self, x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor, lora: HostFactors | None = None
    ) -> None:
        """Begins Kernels.rows; the arguments must stay unchanged until `end`."""
        self.abandon()
        self.number += 1
        if self._worker is not None:
            self._worker.run(lambda: self._timed(x, ids, base, rows, flags, lora))
            self._busy = self._worker.record()
            return
        call = self._kernels.call(x, ids, base, rows, flags, lora)
        word = None if self._word is None else self._word.data_ptr()
        self._busy = call, x, ids, base, rows, flags  # keeps alive what the library's thread reads
        status = native.library().gs_lane_begin(self._native, byref(call.args), word, self.number & 0xFFFFFFFF)
        if status:
            self._busy = None
            native.check(status)

    def end(self) -> tuple[float, float]:
        """Waits; returns the times of the kernel's start and end (time.perf_counter()), or raises its error."""
        if self._busy is None:
            raise RuntimeError("offload.Engine: no call was begun on the CPU lane")
        if self._worker is not None:
            try:
                self._busy.synchronize()
            except Exception:  # the call's error; Ctrl-C leaves the call under way
                self._busy = None
                raise
            self._busy = None
            return self._times[0], self._times[1]
        status = native.library().gs_lane_end(self._native, self._times)
        self._busy = None  # not earlier: after Ctrl-C the call must still be waited for
        native.check(status)
        return self._times[0], self._times[1]

    def close(self) -> None:
        self.abandon()
        if self._worker is not None:
            self._worker.close()
        else:
            self._finalizer()

    def abandon(self) -> None:
        """Waits for a call that was begun and given up, if there is one; ignores its error."""
        if self._busy is None:
            return
        try:
            self.end()
        except (ValueError, RuntimeError, MemoryError):
            pass

    def forget(self) -> None:
        """Forgets the arguments of earlier calls, before another adapter is used."""
        self.abandon()
        self._kernels.forget()

    def _timed(
        self, x: Tensor, ids: Tensor, base: PackedExperts, rows: Tensor, flags: Tensor, lora: HostFactors | None
    ) -> None:
        self._times[0] = time.perf_counter()
        self._kernels.rows(x, ids, base, rows, flags, lora)
        self._times[1] = time.perf_counter()


def _native_lane() -> c_void_p | None:
    library = native.library()
    if not hasattr(library, "gs_lane_ready"):  # an older library
        return None
    library.gs_lane_new.argtypes = [c_void_p]
    library.gs_lane_begin.argtypes = [c_void_p, c_void_p, c_void_p, c_uint32]
    library.gs_lane_ready.argtypes, library.gs_lane_end.argtypes = [c_void_p, c_int32], [c_void_p, c_void_p]
    library.gs_lane_free.argtypes, library.gs_lane_free.restype = [c_void_p], None
    lane = c_void_p()
    native.check(library.gs_lane_new(byref(lane)))
    return lane


def _free_lane(lane: c_void_p, made_in: int) -> None:
    if os.getpid() == made_in:  # a forked child does not have the thread
        native.library().gs_lane_free(lane)
