"""Work that a device repeats: recorded once, started with one call.

    launch()   starts the work on the caller's current stream
    idle()     whether it is done
    wait()     blocks until it is done

A recording never waits for the CPU by itself: before it is recorded, `rehearse` runs the same work without its waits,
so that kernels are compiled and memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .streams import DONE, Done, HostEvent, Worker


class CudaRecording:
    """A CUDA graph; it keeps `run`, because its launches read and write tensors that only `run` may hold."""

    def __init__(self, device: torch.device, run: Callable[[], None], rehearse: Callable[[], None]) -> None:
        self._device, self._run = device, run
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            rehearse()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            run()
        current.wait_stream(stream)

    def launch(self) -> None:
        self._graph.replay()

    def idle(self) -> bool:
        return bool(torch.cuda.current_stream(self._device).query())

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._graph.reset()


class SimulatedRecording:
    """The same on a machine without a GPU: a thread does the work again."""

    def __init__(self, run: Callable[[], None], rehearse: Callable[[], None]) -> None:
        rehearse()
        self._run, self._worker = run, Worker("goldsmith recording")
        self._end: Done | HostEvent = DONE

    def launch(self) -> None:
        self._worker.run(self._run)
        self._end = self._worker.record()

    def idle(self) -> bool:
        return self._end.done

    def wait(self) -> None:
        self._end.synchronize()

    def close(self) -> None:
        self._worker.close()
