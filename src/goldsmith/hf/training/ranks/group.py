"""Ranks: the processes that torchrun started for one run, and what they exchange.

`goldsmith finetune` needs three things of several processes: sums of gradients that repeat bit for bit, a few small
objects a step, and an end of all ranks if one ends. torch.distributed has the first two, and `Presence` is the third.
accelerate would add its own launcher's variables and DDP, whose mean over ranks is another loss where ranks have
different numbers of trained tokens.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from ....core import processors
from ..errors import TrainingError
from ..records.checkpoints import TrainingCheckpoint
from .one_process import OneProcess
from .presence import LIMIT_S, Presence, Process

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from ....experts import PackedExperts

T = TypeVar("T")
START_S = 120.0  # within which all ranks must have started
EXCHANGE_S = 1800.0  # for which a rank waits for others that are alive, but do not come
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH = "torchrun --nproc-per-node N -m goldsmith finetune ..."


class RankLost(TrainingError):
    """Another rank has ended; the message names it and repeats its own."""


class Ranks(OneProcess):
    """This process among `world`; every method with an exchange must be called by all ranks."""

    def __init__(self, environment: Mapping[str, str], start_s: float = START_S):
        self.rank, self.world, self.local_rank, self.local_world = (_number(environment, name) for name in NEEDED[:4])
        for name, number, end in (("RANK", self.rank, self.world), ("LOCAL_RANK", self.local_rank, self.local_world)):
            if not 0 <= number < end:
                raise TrainingError(f"{name} is {number}, but there are {end} ranks; expected 0 to {end - 1}.")
        from torch import distributed

        host, port = environment["MASTER_ADDR"], _number(environment, "MASTER_PORT")
        self._first_holds_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.hosts_store = self.rank == 0 and self._first_holds_store
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")

        def connect(is_master: bool) -> Store:
            try:
                store = distributed.TCPStore(
                    host, port, self.world, is_master, timedelta(seconds=start_s), wait_for_workers=False
                )
            except distributed.DistError as error:
                raise TrainingError(
                    f"Rank {self.rank} of {self.world} did not reach the ranks' store at {host}:{port} in "
                    f"{start_s:.0f} s. Did rank 0 start?"
                ) from error
            return distributed.PrefixStore(f"goldsmith/attempt_{attempt}", store)

        self._store = connect(self.hosts_store)
        self._assemble(start_s)
        limit = timedelta(seconds=EXCHANGE_S)
        inner = distributed.PrefixStore("group", self._store)
        distributed.init_process_group("gloo", store=inner, rank=self.rank, world_size=self.world, timeout=limit)
        self._gpus: ProcessGroup | None = None
        self._machine: ProcessGroup | None = None
        processes: list[object] = [None] * self.world
        distributed.all_gather_object(processes, tuple(Process.this()))
        self._processes = [Process(*cast("tuple[str, str, int]", process)) for process in processes]
        own = connect(False)
        self.presence = Presence(own, self.rank, self._processes, first_holds_store=self._first_holds_store)
        distributed.barrier()  # every rank has a key that others read
        self.presence.start()

    def _assemble(self, limit_s: float) -> None:
        """Waits for all ranks; raises TrainingError with those that are missing."""
        self._store.set(f"here/{self.rank}", "")
        end = time.monotonic() + limit_s
        missing = list(range(self.world))
        while missing := [rank for rank in missing if not self._store.check([f"here/{rank}"])]:
            if time.monotonic() > end:
                names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise TrainingError(
                    f"Of {self.world} ranks, {names} did not start within {limit_s:.0f} s; rank {self.rank} gives up."
                )
            time.sleep(0.05)

    def use(self, device: torch.device) -> None:
        """Gradients on a GPU are summed through NCCL, beside gloo for everything else."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._gpus = cast("ProcessGroup", self._exchange(torch.distributed.new_group, backend="nccl"))

    def gathered(self, value: T) -> list[T]:
        values: list[object] = [None] * self.world
        self._exchange(torch.distributed.all_gather_object, values, value)
        return cast("list[T]", values)

    def checkpoint(self, read: Callable[[], TrainingCheckpoint | None]) -> TrainingCheckpoint | None:
        """The first rank reads, and sends tensor by tensor: only its host needs the folder."""
        start = read() if self.first else None
        described = None
        if start is not None:
            shapes = {name: (tuple(t.shape), t.dtype) for name, t in start.tensors.items()}
            described = start.path, start.step, start.facts, shapes
        described = self.gathered(described)[0]
        if described is None:
            return None
        path, step, facts, shapes = described
        tensors = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in shapes.items()}
        tensors = tensors if start is None else start.tensors
        for name in sorted(tensors):
            self._exchange(torch.distributed.broadcast, tensors[name], 0)
        return TrainingCheckpoint(path, step, tensors, facts)

    def add(self, tensors: Sequence[Tensor]) -> None:
        from ....distributed.ordered_sums import sum_in_rank_order

        on_gpu = [t for t in tensors if t.is_cuda]
        self._exchange(sum_in_rank_order, [t for t in tensors if not t.is_cuda])
        if on_gpu:
            self._exchange(sum_in_rank_order, on_gpu, self._gpus)

    def share(self, make: Callable[[], PackedExperts]) -> PackedExperts:
        from ....distributed import machine_group, shared_base

        if self._machine is None:
            self._machine = cast("ProcessGroup", self._exchange(machine_group))
        bases = [make()] if self._machine.rank() == 0 else []  # outside of the exchange: its errors are this rank's own
        return cast("PackedExperts", self._exchange(shared_base, bases.pop, self._machine))

    def leave(self, message: str) -> bool:
        notice = self.presence.leave(message)
        return notice.rank == self.rank or notice.message != message

    def finish(self) -> None:
        self.gathered(None)
        self.presence.close()
        torch.distributed.destroy_process_group()
        if self.hosts_store:  # it ends with this process
            with contextlib.suppress(RuntimeError):
                self._store.wait([f"finished/{rank}" for rank in range(self.world)], timedelta(seconds=LIMIT_S))

    def bind(self) -> None:
        """Gives this rank its own share of the processors that ranks of this machine were started on."""
        own = (self._processes[self.rank].machine, processors.allowed())
        same = [rank for rank, theirs in enumerate(self.gathered(own)) if theirs == own]
        processors.bind(same.index(self.rank), len(same))

    def _exchange(self, function: Callable[..., object], *arguments: object, **options: object) -> object:
        self.check()
        self.presence.exchanges += 1
        try:
            return function(*arguments, **options)
        except RuntimeError as error:  # of gloo: a connection has ended, or nobody came
            notice = self.presence.wait(LIMIT_S + 5)
            if notice is not None:
                raise RankLost(str(notice)) from error
            behind = ", ".join(map(str, self.presence.behind()))
            raise RankLost(f"rank {behind} did not come to exchange {self.presence.exchanges} ({error})") from error

    def check(self) -> None:
        """Raises RankLost if a rank has ended."""
        if self.presence.notice is not None:
            raise RankLost(str(self.presence.notice))


def join(environment: Mapping[str, str] = os.environ, start_s: float = START_S) -> OneProcess:
    """The ranks that torchrun describes in the environment; `OneProcess` without it.

    Raises TrainingError for an incomplete environment, and for ranks that do not start in time, which it names.
    """
    if environment.get("WORLD_SIZE", "1").strip() in ("", "1"):
        return OneProcess()
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        raise TrainingError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {', '.join(missing)} are not set. Start several ranks "
            f"with {LAUNCH}, or one without WORLD_SIZE."
        )
    return Ranks(environment, start_s)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise TrainingError(f"{name} is {environment[name]!r}; expected a number, as torchrun sets it.") from None
