"""A machine for the device lanes: streams, pinned memory, copies, and marks for timing.

`CudaMachine` is a GPU. `SimulatedMachine` implements the same on a CPU, to test the logic of the lanes: kernels run in
Triton's interpreter, copies in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import CDLL, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..store.expert_store import ExpertStore
from .graphs import CudaRecording, SimulatedRecording
from .streams import CopyStream, CudaStream, CurrentStream, Done, Inline, Worker

_BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses determine the direction
_PATIENCE = 60  # seconds that a simulated stream waits for a word
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: word - number >= 0 in int32


class CudaMachine:
    """Copies run on one stream of their own, `copies`; kernels run on the caller's current stream.

    store   the experts that `copy` copies; None: it copies none
    """

    def __init__(self, store: ExpertStore | None, device: torch.device) -> None:
        from .transport import Transport, runtime

        self.device = device
        self._runtime = runtime()
        if self._runtime is not None:
            self._runtime.cudaMemcpyAsync.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._now, self._compute = -1, CurrentStream(torch.cuda.current_stream(device))
        self.copies = CopyStream(torch.cuda.Stream(device))
        self.transport = None if store is None else Transport(store, device)
        self.mode_and_reason = ("none", "no experts are copied")
        if self.transport is not None:
            self.mode_and_reason = (self.transport.mode, self.transport.why)
        self._waited = torch.cuda.Event()
        self._wait_value, self._write_value = self._word_functions()
        self.waits_for_words = self._wait_value is not None
        self._origin = self.mark(self.copies)
        self._origin.synchronize()
        self._began = time.perf_counter()

    def compute(self) -> CudaStream:
        now = torch._C._cuda_getCurrentRawStream(self._index)
        if now != self._now:
            self._now, self._compute = now, CurrentStream(torch.cuda.current_stream(self.device))
        return self._compute

    def host(self, nbytes: int) -> Tensor:
        """Pinned bytes on the CPU."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def move(self, source: Tensor, into: Tensor, stream: CudaStream) -> None:
        """Copies between the device and pinned memory on `stream`, which must be the current stream; does not wait."""
        if self._runtime is None or not source.is_contiguous() or source.dtype != into.dtype:
            into.copy_(source, non_blocking=True)
            return
        status = self._runtime.cudaMemcpyAsync(
            into.data_ptr(), source.data_ptr(), source.nbytes, _BY_ADDRESS, stream.stream.cuda_stream
        )
        if status:
            self._runtime.cudaGetLastError()
            text = self._runtime.cudaGetErrorString(status).decode(errors="replace")
            raise RuntimeError(f"offload.Engine: a copy of {source.nbytes} bytes failed: {text}")

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Copies an expert's bytes to the device on `copies`."""
        if self.transport is None:
            raise RuntimeError("offload.Engine: this machine was created without a store, so it copies no experts")
        self.transport.copy(source, into, self.copies.stream)

    def run_on_copies(self, work: Callable[..., object]) -> None:
        """Runs other torch work on `copies`."""
        with torch.cuda.stream(self.copies.stream):
            work()

    def mark(self, stream: CudaStream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream.stream)
        return event

    def wait(self, stream: CudaStream) -> None:
        """Waits until `stream` has done all its work."""
        self._waited.record(stream.stream)
        self._waited.synchronize()

    def wait_for_word(self, word: Tensor, number: int, stream: CudaStream) -> None:
        """Makes `stream` wait until the pinned int32 [1] `word` reaches `number`."""
        status = self._wait_value(stream.stream.cuda_stream, word.data_ptr(), number & 0xFFFFFFFF, _AT_LEAST)
        if status:
            raise RuntimeError(
                f"offload.Engine: the stream cannot wait for a word in host memory (driver error {status})"
            )

    def write_word(self, word: Tensor, number: int, stream: CudaStream) -> None:
        """Makes `stream` set the pinned int32 [1] `word` when all its earlier work is done and visible."""
        status = self._write_value(stream.stream.cuda_stream, word.data_ptr(), number & 0xFFFFFFFF, 0)
        if status:
            raise RuntimeError(f"offload.Engine: the stream cannot set a word in host memory (driver error {status})")

    def _word_functions(self) -> tuple[Any, Any]:
        """The driver's functions for `wait_for_word` and `write_word`, tried once; None where they do not work."""
        try:
            driver = CDLL("libcuda.so.1")
            functions = driver.cuStreamWaitValue32_v2, driver.cuStreamWriteValue32_v2
        except (OSError, AttributeError):
            return None, None
        word, stream = self.host(4).view(torch.int32).zero_(), self.copies.stream.cuda_stream
        for function in functions:
            function.argtypes = [c_void_p, c_void_p, c_uint32, c_uint32]
            if function(stream, word.data_ptr(), 0, _AT_LEAST):
                return None, None
        self.copies.stream.synchronize()
        return functions

    def record(self, run: Callable[[], None], rehearse: Callable[[], None]) -> CudaRecording:
        """`run` as a recording; it may launch kernels and wait for words."""
        return CudaRecording(self.device, run, rehearse)

    def new_mark(self) -> torch.cuda.Event:
        """A mark to be set later."""
        return torch.cuda.Event(enable_timing=True)

    def set(self, mark: torch.cuda.Event, stream: CudaStream) -> None:
        mark.record(stream.stream)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def happened(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def time_of(self, mark: torch.cuda.Event) -> float:
        """The time of a mark on the clock of time.perf_counter(), to about 10 us."""
        return self._began + self._origin.elapsed_time(mark) / 1e3

    def settle(self) -> None:
        self.copies.stream.synchronize()

    def close(self) -> None:
        self.settle()
        if self.transport is not None:
            self.transport.close()


class TimeMark(Done):
    """A moment of the past."""

    def __init__(self, at: float) -> None:
        self.at = at


class SimulatedMachine:
    """A machine without a GPU, for tests: `CudaMachine` with work done at once, and copies in a thread."""

    device = torch.device("cpu")
    waits_for_words = True

    def __init__(self) -> None:
        self.copies = Worker("goldsmith copies")
        self.mode_and_reason = ("memory", "a machine without a GPU, for tests")

    def compute(self) -> Inline:
        return Inline()

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, source: Tensor, into: Tensor) -> None:
        into.copy_(source)

    def run_on_copies(self, work: Callable[..., object]) -> None:
        work()

    def move(self, source: Tensor, into: Tensor, stream: Inline) -> None:
        into.copy_(source)

    def mark(self, stream: Inline) -> TimeMark:
        return TimeMark(time.perf_counter())

    def wait(self, stream: Inline) -> None:
        pass

    def wait_for_word(self, word: Tensor, number: int, stream: Inline) -> None:
        until_word(word, number)

    def write_word(self, word: Tensor, number: int, stream: Inline) -> None:
        word.numpy()[0] = number

    def record(self, run: Callable[[], None], rehearse: Callable[[], None]) -> SimulatedRecording:
        return SimulatedRecording(run, rehearse)

    def new_mark(self) -> TimeMark:
        return TimeMark(0.0)

    def set(self, mark: TimeMark, stream: Inline) -> None:
        mark.at = time.perf_counter()

    def seconds(self, begin: TimeMark, end: TimeMark) -> float:
        return end.at - begin.at

    def happened(self, mark: TimeMark) -> bool:
        return True

    def time_of(self, mark: TimeMark) -> float:
        return mark.at

    def settle(self) -> None:
        self.copies.record().synchronize()

    def close(self) -> None:
        self.copies.close()


def until_word(word: Tensor, number: int) -> None:
    """Waits until int32 [1] `word` reaches `number`, as a stream of `CudaMachine` does."""
    there, until = word.numpy(), time.perf_counter() + _PATIENCE
    while (int(there[0]) - number) % 2**32 >= 2**31:
        if time.perf_counter() > until:
            raise TimeoutError(f"a word in host memory is still {int(there[0])} after {_PATIENCE} s; expected {number}")
        time.sleep(1e-5)
