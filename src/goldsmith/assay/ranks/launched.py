"""The ranks of a launcher, such as torchrun, as a pool: rank 0 judges and computes, the others serve it.

    torchrun --nproc-per-node 2 -m goldsmith verify my_step.py

Functions and answers travel through the launcher's store, not through collectives, so that a rank that hangs or ends
is noticed and named. The ranks may be on several hosts.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from .pool import LIMIT_S, RankError, in_words

STORE = "goldsmith_ranks"
_END = pickle.dumps(None)
_POLL_S = 0.02


class LaunchedRanks:
    """Like RankPool, for rank 0 of a launcher."""

    def __init__(self, *, device: str = "cpu", local_rank: int = 0, limit_s: float = LIMIT_S) -> None:
        self.world, self.device, self._limit_s = _joined(device, local_rank, limit_s)
        self._store, self._calls = _store(), 0
        self._lost = False

    def run(self, function: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> list[object]:
        """[function(*arguments[rank]) on every rank]; raises RankError, after which the ranks are lost."""
        self._calls += 1
        for rank in range(1, self.world):
            self._store.set(f"call {self._calls} {rank}", pickle.dumps((function, arguments[rank])))
        own: list[tuple[bool, Any]] = []
        thread = threading.Thread(target=lambda: own.append(_answer(function, arguments[0])), daemon=True)
        thread.start()
        answers: dict[int, tuple[bool, object]] = {}
        until = time.monotonic() + self._limit_s
        while len(answers) < self.world and time.monotonic() < until:
            time.sleep(_POLL_S)
            if own and 0 not in answers:
                answers[0] = own[0]
            for rank in range(1, self.world):
                key = f"answer {self._calls} {rank}"
                if rank not in answers and self._store.check([key]):
                    answers[rank] = pickle.loads(self._store.get(key))
                    self._store.delete_key(key)
            if any(not ok for ok, _ in answers.values()):
                until = min(until, time.monotonic() + 2.0)
        raised = [f"rank {rank}: {value}" for rank, (ok, value) in sorted(answers.items()) if not ok]
        silent = [rank for rank in range(self.world) if rank not in answers]
        if raised or silent:
            self._lost = True
            missing = ", ".join(map(str, silent))
            raise RankError("; ".join(raised) or f"rank {missing} did not answer in {self._limit_s:.0f} s")
        return [answers[rank][1] for rank in range(self.world)]

    @property
    def alive(self) -> bool:
        """Whether no rank was lost."""
        return not self._lost

    def close(self) -> None:
        """Ends the serving of the other ranks."""
        self._calls += 1
        for rank in range(1, self.world):
            self._store.set(f"call {self._calls} {rank}", _END)


def serve(rank: int, *, device: str = "cpu", local_rank: int = 0, limit_s: float = LIMIT_S) -> None:
    """On every rank but 0: runs what rank 0 sends, until it closes."""
    _joined(device, local_rank, limit_s)
    store, calls = _store(), 0
    while True:
        calls += 1
        key = f"call {calls} {rank}"
        while not store.check([key]):
            time.sleep(_POLL_S)
        message = store.get(key)
        store.delete_key(key)
        if message == _END:
            return
        function, arguments = pickle.loads(message)
        store.set(f"answer {calls} {rank}", pickle.dumps(_answer(function, arguments)))


def _answer(function: Callable[..., object], arguments: tuple[object, ...]) -> tuple[bool, object]:
    try:
        return True, function(*arguments)
    except Exception as error:  # noqa: BLE001  whatever a rank raises is reported by the judge
        return False, in_words(error)


def _joined(device: str, local_rank: int, limit_s: float) -> tuple[int, str, float]:
    """Joins the launcher's process group; (number of ranks, device, limit)."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if not distributed.is_initialized():
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=2 * limit_s + 5)
        )
    return distributed.get_world_size(), device, limit_s


def _store() -> distributed.Store:
    return distributed.PrefixStore(STORE, distributed.distributed_c10d._get_default_store())
