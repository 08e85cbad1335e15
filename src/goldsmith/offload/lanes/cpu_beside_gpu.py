"""The CPU lane beside a GPU: transfers of x to the CPU and of the computed rows to the device.

For a prompt, a GPU kernel writes the x of the CPU's routes to host memory. Copies would have to queue behind copies of
experts, which can start first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..adapters import NO_ADAPTER, ActiveLora
from ..memory.machine import CudaMachine
from ..memory.pinned_buffers import PinnedBuffers
from ..memory.streams import CudaStream
from ..planning.call import Call
from ..store.expert_store import ExpertStore
from .cpu_lane import CpuLane
from .kernels import kernel_module
from .route_order import SortedRoutes

EARLY = 64  # most tokens whose x is copied along with their ids: 256 KiB for 2048 numbers each, about 6 us
FETCHED = 16  # most routes of a token whose rows the merge may read from host memory


class CpuBesideGpu:
    """Runs `lane` for one call at a time

    begun   the rows that the CPU already computes for the current call; None if it waits for the whole call
    signals_stream   whether a stream can wait for the lane by itself, so that no thread has to
    """

    def __init__(self, store: ExpertStore, machine: CudaMachine, rows: int, threads: int) -> None:
        self.store, self.machine = store, machine
        with torch.inference_mode(False):
            self._word = machine.host(4).view(torch.int32).zero_()
        self.lora: ActiveLora = NO_ADAPTER
        self.lane = CpuLane(store.options, threads, self._word if machine.waits_for_words else None)
        self.ids, self.x, self.results = (PinnedBuffers(machine.host) for _ in range(3))
        self._tokens = PinnedBuffers(machine.host)
        self._gathered, self._wide = (PinnedBuffers(_pageable) for _ in range(2))
        with torch.inference_mode(False):
            self._routes = torch.empty(1, rows, dtype=torch.int64, device="cpu")
            self._flags = torch.empty(rows, dtype=torch.uint8, device="cpu")
        self._routes_there = self._routes.numpy()
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        self._early: tuple[Tensor, Tensor] | None = None
        self.begun: Tensor | None = None

    def to_host(self, index: Tensor, x: Tensor, alone: bool, stream: CudaStream) -> Tensor:
        """The ids on the CPU, valid until the second call after this one. alone: the CPU will not need x."""
        host = self.ids.take(index.shape, index.dtype)
        self._early = self.begun = None
        if alone or x.shape[0] > EARLY:
            self.machine.move(index, host, stream)
        else:
            self._early = x, self.x.take(x.shape, x.dtype)
            if x.shape[0] == 1 and host.numel() and x.is_contiguous() and index.is_contiguous():
                kernel_module("offload.lanes._triton").fetch(x, index, self._early[1], host)
            else:
                self.machine.move(index, host, stream)
                self.machine.move(x, self._early[1], stream)
        self.machine.wait(stream)
        return host

    def begin_early(self, layer: int, x: Tensor, experts: Sequence[int], counts: Sequence[int]) -> None:
        """Begins the CPU's part of a call of one token, whose rows are in the order of the experts

        x must be the tensor given to `to_host`; does nothing if it was not copied along with the ids.
        """
        if self._early is None or self._early[0] is not x:
            return
        early = self._early[1]
        if early.dtype == torch.float16:
            early = early.float()
        wanted = sorted(experts)
        if sum([counts[e] for e in wanted]) != len(wanted):
            wanted = [e for e in wanted for _ in range(counts[e])]
        ids, flags = self._of_size(len(wanted))
        self._routes_there[0, : len(wanted)] = wanted
        self.begun = self._begin(layer, early, ids, flags, len(wanted))

    def gather_inputs(self, call: Call, where: SortedRoutes) -> tuple[Tensor, bool]:
        """(x of the CPU's rows, in their order; whether it arrives only when the call's stream has been waited for)."""
        tokens = np.asarray(where.order[: where.leading]) // call.ids.shape[1]
        # x came along with the ids, unless the call is a piece of a longer one, or x was changed since
        if self._early is not None and self._early[0] is call.caller_x:
            call.tally.bytes_d2h += self._early[1].nbytes
            return _take_rows(self._early[1], tokens, self._gathered), False
        token_list = self._tokens.take((len(tokens),), torch.int32)
        token_list.numpy()[:] = tokens
        x = self.x.take((len(tokens), call.x.shape[1]), call.x.dtype)
        kernel_module("offload.lanes._triton").gather(call.x, token_list, x)
        call.tally.bytes_d2h += x.nbytes
        return x, True

    def begin(self, call: Call, where: SortedRoutes, x: Tensor) -> Tensor:
        """The rows that the CPU lane starts to compute from x, which must have arrived."""
        n = where.leading
        if x.dtype == torch.float16:
            wide = self._wide.take(tuple(x.shape), torch.float32)
            wide.numpy()[:] = x.numpy()
            x = wide
        ids, flags = self._of_size(n)
        self._routes_there[0, :n] = call.ids.numpy().reshape(-1)[np.asarray(where.order[:n])]
        return self._begin(call.layer, x, ids.view(n, 1), flags, n)

    @property
    def signals_stream(self) -> bool:
        return self.lane.signals_stream

    def make_stream_wait(self, stream: CudaStream) -> None:
        """Makes `stream` wait for the rows that were begun last."""
        self.machine.wait_for_word(self._word, self.lane.number, stream)

    def end(self) -> tuple[float, float]:
        """Waits for the rows; returns when the lane began and ended, on the clock of time.perf_counter()."""
        return self.lane.end()

    def close(self) -> None:
        self.lane.close()

    def _begin(self, layer: int, x: Tensor, ids: Tensor, flags: Tensor, n: int) -> Tensor:
        rows = self.results.take((n, self.store.hidden_size), torch.float32)
        self.lane.begin(x, ids, self.store.experts(layer), rows, flags, self.lora.on_cpu(layer))
        return rows

    def _of_size(self, n: int) -> tuple[Tensor, Tensor]:
        """ids [1, n] and flags [n] for the lane; keeps the views for few routes."""
        views = self._views.get(n)
        if views is None:
            views = self._routes[:, :n], self._flags[:n]
            if n <= 64:
                self._views[n] = views
        return views


def _pageable(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _take_rows(x: Tensor, tokens: np.ndarray, into: PinnedBuffers) -> Tensor:
    """x[tokens] on the CPU, in this thread: torch's threads would stay awake and take cores from the lane's threads."""
    out = into.take((len(tokens), x.shape[1]), x.dtype)
    bits = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    np.take(x.view(bits).numpy(), tokens, axis=0, out=out.view(bits).numpy(), mode="clip")
    return out
