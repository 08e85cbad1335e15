"""Processes with a torch.distributed group, which run functions of the judge's process.

The judge stays outside of the group: it sends each rank its function and arguments through a pipe and waits for all
answers. A rank that raises, dies or does not answer in time is named, and the pool ends with it, because the others
may wait for it in a collective forever. When time is up, every rank writes its stack (stacks.py), which tells those
that wait in a collective from the one that they wait for.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pickle import PicklingError
from typing import Any, Protocol

import torch
from torch import distributed

from ...core.tracing import TargetError
from ..execute import interpreter
from ..gate.isolation import own_process
from . import stacks

LIMIT_S = 120.0
START_S = 120.0  # in which ranks start, and import what they need
LOCAL = "127.0.0.1"
PRELOADED = ["torch.distributed.tensor", __package__]  # imported once for all ranks: a second of each rank's start


class RankError(RuntimeError):
    """A rank raised, died or did not answer; the message names it."""


class RankGroup(Protocol):
    """Processes of one group: RankPool starts them, LaunchedRanks (launched.py) got them from a launcher."""

    world: int
    device: str

    @property
    def alive(self) -> bool: ...

    def run(
        self, function: Callable[..., object], arguments: Sequence[tuple[object, ...]], *, limit_s: float | None = None
    ) -> list[Any]: ...

    def close(self) -> None: ...


class RankPool:
    """`world` ranks on this machine: gloo on CPUs, NCCL with device="cuda", one GPU per rank."""

    def __init__(self, world: int, *, device: str = "cpu", limit_s: float = LIMIT_S) -> None:
        if not isinstance(world, int) or world < 1:
            raise ValueError(f"RankPool: world={world!r}, expected a number of ranks of at least 1")
        if device == "cuda" and torch.cuda.device_count() < world:
            raise ValueError(f"RankPool: world={world} ranks need as many GPUs; this machine has {_gpus()}")
        self.world, self.device, self._limit_s = world, device, limit_s
        context = _context(device)
        if device == "cpu":
            context.set_forkserver_preload([*PRELOADED])
        self._store = distributed.TCPStore(LOCAL, 0, None, True, wait_for_workers=False)
        self._processes, self._pipes, self._stacks = [], [], []
        for rank in range(world):
            (here, there), (stack, write) = context.Pipe(), context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(rank, world, device, self._store.port, there, write, limit_s), daemon=True
            )
            with own_process.safe_path():
                process.start()
            there.close()
            write.close()
            self._processes.append(process)
            self._pipes.append(here)
            self._stacks.append(stack)
        self._receive(START_S + limit_s)

    def run(
        self, function: Callable[..., object], arguments: Sequence[tuple[object, ...]], *, limit_s: float | None = None
    ) -> list[object]:
        """[function(*arguments[rank]) on every rank]; the function must be importable. Raises RankError.

        limit_s   within which all must answer; default: the pool's
        """
        if not self._processes:
            raise RankError("the ranks have ended")
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, arguments[rank]))
            except (BrokenPipeError, OSError) as error:
                self.close()
                raise RankError(f"rank {rank} has ended") from error
            except (PicklingError, AttributeError, TypeError) as error:  # before anything was sent
                what = getattr(function, "__name__", type(function).__name__)
                raise TargetError(
                    f"{what} cannot be sent to the ranks ({error}); define it at the top level of a module"
                ) from error
        return self._receive(self._limit_s if limit_s is None else limit_s)

    def _receive(self, limit_s: float) -> list[object]:
        """The answers of all ranks; raises RankError for the rank that ended, raised, or did not answer."""
        answers: dict[int, object] = {}
        ended: dict[int, str] = {}
        raised: dict[int, str] = {}
        until = time.monotonic() + limit_s
        while waiting := [r for r in range(self.world) if r not in answers and r not in ended and r not in raised]:
            pipes = [self._pipes[r] for r in waiting]
            ready = multiprocessing.connection.wait(pipes, max(0.0, until - time.monotonic()))
            if not ready:
                break
            for rank in (r for r in waiting if self._pipes[r] in ready):
                try:
                    ok, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    ended[rank] = _ending(self._processes[rank].exitcode)
                else:
                    (answers if ok else raised)[rank] = value
            if ended or raised:  # the others may wait for it forever
                until = min(until, time.monotonic() + 2.0)
        if not (ended or raised or waiting):
            return [answers[rank] for rank in range(self.world)]
        if ended:  # what others raise is that they lost the connection
            text = "; ".join(f"rank {rank} {how}" for rank, how in sorted(ended.items()))
        elif raised:
            text = "; ".join(f"rank {rank}: {value}" for rank, value in sorted(raised.items()))
        else:
            processes = {rank: self._processes[rank].pid for rank in waiting}
            standing = stacks.written(processes, {rank: self._stacks[rank] for rank in waiting})
            text = stacks.explained(standing, set(answers), limit_s, set(waiting) - set(standing))
        self.close()
        raise RankError(text)

    @property
    def alive(self) -> bool:
        """Whether the ranks can run another function; they end after a RankError."""
        return bool(self._processes)

    def close(self) -> None:
        for pipe in (*self._pipes, *self._stacks):
            pipe.close()
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._stacks = [], [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _context(device: str) -> Any:
    """How ranks start: forked from a process that has imported torch, or, because CUDA cannot be forked, anew."""
    return multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")


def _ending(status: int | None) -> str:
    """How a process ended: "ended with exit status 7", "was killed by SIGKILL"."""
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _gpus() -> str:
    return str(torch.cuda.device_count() or "none")


def in_words(error: Exception) -> str:
    """Class, message and place of an error: the innermost frame that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not stacks.of_torch(f.filename)), frames[-1])
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"


def run_on_rank(function: Callable[..., object], arguments: tuple[object, ...]) -> tuple[bool, object]:
    """(True, result) of the function on this rank, or (False, message); the user's code runs in here."""
    try:
        with interpreter.watching():  # where kernels run in Triton's interpreter, as quickly as in a check
            result = function(*arguments)
    except Exception as error:  # noqa: BLE001  whatever a rank raises is reported by the judge
        return False, in_words(error)
    if not distributed.is_initialized():
        return False, "the step destroyed the process group, which belongs to its caller and is needed afterwards"
    return True, result


def _serve(
    rank: int, world: int, device: str, port: int, pipe: Connection, write: Connection, limit_s: float
) -> None:  # fmt: skip
    """A rank: answers (function, arguments) with (True, result) or (False, message) until the pipe closes."""
    own_process.forget_safe_path()
    torch.set_num_threads(1)
    stacks.write_on_signal(write.fileno())
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=distributed.TCPStore(LOCAL, port, None, False, timedelta(seconds=START_S)),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=2 * limit_s + 5),  # the judge's limit comes first, and its message says more
        )
        pipe.send((True, None))
    except Exception as error:  # noqa: BLE001  whatever a rank raises is reported by the judge
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        reply = run_on_rank(function, arguments)
        try:
            pipe.send(reply)
        except (BrokenPipeError, OSError):
            break
    os._exit(0)  # destroying the group would wait for ranks that have ended
