"""The CPU's lane beside a GPU: x of its routes on the way there, and the rows that it makes.

x of a prompt's routes is written to the host by a kernel, which reads there what tokens they are of: copies would stand
in line behind those of experts, which can begin first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory.pinned_buffers import Transit
from ..planning.call import Call
from ..store.expert_store import ExpertStore
from .cpu_lane import Lane
from .kernels import loaded
from .route_order import Sorted

EARLY = 64  # tokens whose x comes to the CPU with their ids: 256 KiB of 2048 numbers, some 6 us
FETCHED = 16  # routes of a token whose rows the merge may read where the CPU made them


class Beside:
    """`lane` makes what is begun here, one call at a time

    begun   rows of the call under way that the CPU makes already; None if it waits for the whole call
    tells   whether a stream can be told to wait for the lane, so that nobody else has to
    """

    def __init__(self, store: ExpertStore, machine: Any, rows: int, threads: int) -> None:
        self.store, self.machine = store, machine
        with torch.inference_mode(False):
            self._word = machine.host(4).view(torch.int32).zero_()
        self.lane = Lane(store.options, threads, self._word if machine.waits_for_words else None)
        self.ids, self.x, self.made = (Transit(machine.host) for _ in range(3))
        self._tokens = Transit(machine.host)
        self._gathered, self._wide = (Transit(_ordinary) for _ in range(2))
        with torch.inference_mode(False):
            self._routes = torch.empty(1, rows, dtype=torch.int64, device="cpu")
            self._flags = torch.empty(rows, dtype=torch.uint8, device="cpu")
        self._routes_there = self._routes.numpy()
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        self._early: tuple[Tensor, Tensor] | None = None
        self.begun: Tensor | None = None

    def to_host(self, index: Tensor, x: Tensor, alone: bool, stream: Any) -> Tensor:
        """The ids on the CPU. alone: it will not need x. They are valid until the second call after this one."""
        host = self.ids.take(index.shape, index.dtype)
        self._early = self.begun = None
        if alone or x.shape[0] > EARLY:
            self.machine.move(index, host, stream)
        else:
            self._early = x, self.x.take(x.shape, x.dtype)
            if x.shape[0] == 1 and host.numel() and x.is_contiguous() and index.is_contiguous():
                loaded("offload.lanes._triton").fetch(x, index, self._early[1], host)
            else:
                self.machine.move(index, host, stream)
                self.machine.move(x, self._early[1], stream)
        self.machine.wait(stream)
        return host

    def begin_early(self, layer: int, x: Tensor, experts: Sequence[int], counts: Sequence[int]) -> None:
        """Begins the CPU's part of a call of one token, whose rows are in the order of the experts

        x as it was given to `to_host`; nothing is done if it did not come over with the ids.
        """
        if self._early is None or self._early[0] is not x:
            return
        there = self._early[1]
        if there.dtype == torch.float16:
            there = there.float()
        wanted = sorted(experts)
        if sum([counts[e] for e in wanted]) != len(wanted):
            wanted = [e for e in wanted for _ in range(counts[e])]
        ids, flags = self._of_size(len(wanted))
        self._routes_there[0, : len(wanted)] = wanted
        self.begun = self._begin(layer, there, ids, flags, len(wanted))

    def bring(self, call: Call, where: Sorted) -> tuple[Tensor, bool]:
        """x of the CPU's rows, in their order, and whether it is on its way: until the call's stream was waited for."""
        tokens = np.asarray(where.order[: where.leading]) // call.ids.shape[1]
        # x came over with the ids, unless the call is a part of it, or something else was put there
        if self._early is not None and self._early[0] is call.given:
            call.tally.bytes_d2h += self._early[1].nbytes
            return _taken(self._early[1], tokens, self._gathered), False
        listed = self._tokens.take((len(tokens),), torch.int32)
        listed.numpy()[:] = tokens
        x = self.x.take((len(tokens), call.x.shape[1]), call.x.dtype)
        loaded("offload.lanes._triton").gather(call.x, listed, x)
        call.tally.bytes_d2h += x.nbytes
        return x, True

    def begin(self, call: Call, where: Sorted, x: Tensor) -> Tensor:
        """The rows that the CPU's lane begins to make of what was brought, and is there."""
        n = where.leading
        if x.dtype == torch.float16:
            wide = self._wide.take(tuple(x.shape), torch.float32)
            wide.numpy()[:] = x.numpy()
            x = wide
        ids, flags = self._of_size(n)
        self._routes_there[0, :n] = call.ids.numpy().reshape(-1)[np.asarray(where.order[:n])]
        return self._begin(call.layer, x, ids.view(n, 1), flags, n)

    @property
    def tells(self) -> bool:
        return self.lane.tells

    def follow(self, stream: Any) -> None:
        """What `stream` is given from now on comes behind the rows that were begun last."""
        self.machine.behind(self._word, self.lane.number, stream)

    def end(self) -> tuple[float, float]:
        """Waits for the rows: when the lane began and ended, of time.perf_counter()."""
        return self.lane.end()

    def close(self) -> None:
        self.lane.close()

    def _begin(self, layer: int, x: Tensor, ids: Tensor, flags: Tensor, n: int) -> Tensor:
        made = self.made.take((n, self.store.hidden_size), torch.float32)
        self.lane.begin(x, ids, self.store.experts(layer), made, flags)
        return made

    def _of_size(self, n: int) -> tuple[Tensor, Tensor]:
        """ids [1, n] and flags [n] for the lane; of few routes the views are kept."""
        found = self._views.get(n)
        if found is None:
            found = self._routes[:, :n], self._flags[:n]
            if n <= 64:
                self._views[n] = found
        return found


def _ordinary(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _taken(x: Tensor, tokens: np.ndarray, into: Transit) -> Tensor:
    """x[tokens] on the CPU, in this thread: torch's own threads would stay awake and take the cores from the lane's."""
    found = into.take((len(tokens), x.shape[1]), x.dtype)
    bits = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    np.take(x.view(bits).numpy(), tokens, axis=0, out=found.view(bits).numpy(), mode="clip")
    return found
