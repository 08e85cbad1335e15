"""Processes with a torch.distributed group, which run functions of the judge's process.

The judge stays outside of the group: it sends each rank its function and arguments through a pipe and waits for all
answers. A rank that raises, dies or does not answer in time is named, and the pool ends with it, because the others
may wait for it in a collective forever.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

LIMIT_S = 120.0
START_S = 120.0


class RankError(RuntimeError):
    """A rank raised, died or did not answer; the message names it."""


class RankPool:
    """`world` ranks on this machine: gloo on CPUs, NCCL with device="cuda", one GPU per rank."""

    def __init__(self, world: int, *, device: str = "cpu", limit_s: float = LIMIT_S) -> None:
        if not isinstance(world, int) or world < 1:
            raise ValueError(f"RankPool: world={world!r}, wanted a number of ranks of at least 1")
        if device == "cuda" and torch.cuda.device_count() < world:
            raise ValueError(f"RankPool: world={world} ranks need as many GPUs; this machine has {_gpus()}")
        self.world, self.device, self._limit_s = world, device, limit_s
        context = _context(device)
        if device == "cpu":
            context.set_forkserver_preload(["torch.distributed.tensor"])
        handle, self._store = tempfile.mkstemp(prefix="goldsmith-ranks-")
        os.close(handle)
        os.unlink(self._store)
        self._processes, self._pipes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world, device, self._store, there, limit_s), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._receive(START_S + limit_s)

    def run(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """[function(*arguments[rank]) on every rank]; the function must be importable. Raises RankError."""
        if not self._processes:
            raise RankError("the ranks have ended")
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, arguments[rank]))
            except (BrokenPipeError, OSError) as error:
                self.close()
                raise RankError(f"rank {rank} has ended") from error
        return self._receive(self._limit_s)

    def _receive(self, limit_s: float) -> list[Any]:
        answers: list[Any] = []
        problems: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(limit_s if not problems else 2.0):  # after a failure, the others wait in a collective
                    problems.append(f"rank {rank} did not answer in {limit_s:.0f} s")
                    continue
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(5)
                problems.append(f"rank {rank} ended with exit status {self._processes[rank].exitcode}")
                continue
            answers.append(value)
            if not ok:
                problems.append(f"rank {rank}: {value}")
        if problems:
            self.close()
            raised = [problem for problem in problems if "did not answer" not in problem]
            raise RankError((raised or problems)[0] if len(raised) == 1 else "; ".join(raised or problems))
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if os.path.exists(self._store):
            os.unlink(self._store)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _context(device: str) -> Any:
    """How ranks start: forked from a process that has imported torch, or, because CUDA cannot be forked, anew."""
    return multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")


def _gpus() -> str:
    return str(torch.cuda.device_count() or "none")


def _serve(rank: int, world: int, device: str, store: str, pipe: Connection, limit_s: float) -> None:
    """A rank: answers (function, arguments) with (True, result) or (False, message) until the pipe closes."""
    from torch import distributed

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=limit_s),
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
        try:
            answer = (True, function(*arguments))
        except Exception as error:  # noqa: BLE001  whatever a rank raises is reported by the judge
            frame = traceback.extract_tb(error.__traceback__)[-1]
            answer = (False, f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})")
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            break
    os._exit(0)  # destroying the group would wait for ranks that have ended
