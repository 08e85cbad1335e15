"""The ranks of a launcher, such as torchrun, as a pool: rank 0 judges and computes, the others serve it.

    torchrun --nproc-per-node 2 -m goldsmith verify my_step.py

Functions and answers travel through the launcher's store, not through collectives, so that a rank that hangs or ends
is noticed and named. A thread of each rank counts up in the store, and writes the rank's stacks there when rank 0 asks
for them. The ranks may be on several hosts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import distributed

from . import stacks
from .pool import LIMIT_S, START_S, RankError, run_on_rank

STORE = "goldsmith_ranks"
BEGIN = "begin"  # rank 0 has something to run, or ends
_END = pickle.dumps(None)
_POLL_S = 0.02
_BEAT_S = 0.5
_ENDS_S = 20.0  # for which rank 0 waits for the ends of the others, if it holds the store
_GONE_S = 10.0  # without a beat; a rank under load may be late


class LaunchedRanks:
    """Like RankPool, for rank 0 of a launcher."""

    def __init__(self, *, device: str = "cpu", local_rank: int = 0, limit_s: float = LIMIT_S) -> None:
        self.device, self._limit_s = device, limit_s
        self._store = _store(START_S + limit_s)
        self._store.set(BEGIN, "run")
        _wait_for_starts(self._store, START_S + limit_s)
        self.world = _join(self._store, device, local_rank, limit_s)
        self._calls, self._lost = 0, False
        self._beats: dict[int, tuple[bytes, float]] = {}

    def run(
        self, function: Callable[..., object], arguments: Sequence[tuple[object, ...]], *, limit_s: float | None = None
    ) -> list[object]:
        """[function(*arguments[rank]) on every rank]; raises RankError, after which the ranks are lost."""
        self._calls += 1
        limit = self._limit_s if limit_s is None else limit_s
        for rank in range(1, self.world):
            self._store.set(f"call {self._calls} {rank}", pickle.dumps((function, arguments[rank])))
        own: list[tuple[bool, object]] = []
        thread = threading.Thread(target=lambda: own.append(run_on_rank(function, arguments[0])), daemon=True)
        thread.start()
        answers: dict[int, tuple[bool, object]] = {}
        ended: set[int] = set()
        until = time.monotonic() + limit
        while len(answers) + len(ended) < self.world and time.monotonic() < until:
            time.sleep(_POLL_S)
            if own and 0 not in answers:
                answers[0] = own[0]
            for rank in range(1, self.world):
                key = f"answer {self._calls} {rank}"
                if rank not in answers and self._store.check([key]):
                    answers[rank] = pickle.loads(self._store.get(key))
                    self._store.delete_key(key)
            ended = {rank for rank in range(1, self.world) if rank not in answers and self._gone(rank)}
            if any(not ok for ok, _ in answers.values()) and not ended:
                # an error may come from the end of another rank, which is known a little later
                until = min(until, time.monotonic() + _GONE_S + 2.0)
            if ended:
                until = min(until, time.monotonic() + 2.0)
        if all(rank in answers and answers[rank][0] for rank in range(self.world)):
            return [answers[rank][1] for rank in range(self.world)]
        self._lost = True
        raise RankError(self._explained(answers, ended, limit))

    def _explained(self, answers: dict[int, tuple[bool, object]], ended: set[int], limit: float) -> str:
        if ended:  # what others raise is that they lost the connection
            return "; ".join(f"rank {rank} has ended, or no longer runs" for rank in sorted(ended))
        raised = [f"rank {rank}: {value}" for rank, (ok, value) in sorted(answers.items()) if not ok]
        if raised:
            return "; ".join(raised)
        silent = {rank for rank in range(self.world) if rank not in answers}
        self._store.set(f"stacks {self._calls}", "")
        standing = {}
        if 0 in silent and (place := stacks.of_text(stacks.own_text())) is not None:
            standing[0] = place
        until = time.monotonic() + stacks.PATIENCE_S + 2 * _BEAT_S
        while time.monotonic() < until and (waiting := silent - set(standing) - {0}):
            time.sleep(_POLL_S)
            for rank in waiting:
                key = f"stack {self._calls} {rank}"
                if self._store.check([key]):
                    if (place := stacks.of_text(self._store.get(key).decode())) is None:
                        break
                    standing[rank] = place
        return stacks.explained(standing, set(answers), limit, silent - set(standing))

    def _gone(self, rank: int) -> bool:
        """Whether the rank's beat has stood still."""
        key, now = f"beat {rank}", time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        last, since = self._beats.get(rank, (None, now))
        if beat != last:
            self._beats[rank] = (beat, now)
            return False
        return now - since > _GONE_S

    @property
    def alive(self) -> bool:
        """Whether no rank was lost."""
        return not self._lost

    def close(self) -> None:
        """Ends the serving of the other ranks."""
        self._calls += 1
        for rank in range(1, self.world):
            self._store.set(f"call {self._calls} {rank}", _END)
        if not self._lost:
            _wait_for_ends(self._store)


def end_without_a_run() -> None:
    """On rank 0, if it has nothing to run: the others end, instead of waiting for it."""
    with contextlib.suppress(distributed.DistError):  # the launcher may have ended them already
        store = _store(_ENDS_S)
        store.set(BEGIN, "end")
        _wait_for_ends(store)


def _wait_for_starts(store: distributed.Store, limit_s: float) -> None:
    """Raises RankError with the ranks that do not come."""
    missing, until = list(range(1, _number("WORLD_SIZE"))), time.monotonic() + limit_s
    while missing := [rank for rank in missing if not store.check([f"here {rank}"])]:
        if time.monotonic() > until:
            names = ", ".join(map(str, missing))
            raise RankError(f"of {_number('WORLD_SIZE')} ranks, rank {names} did not start within {limit_s:.0f} s")
        time.sleep(_POLL_S)


def _wait_for_ends(store: distributed.Store) -> None:
    """A store that this process holds must outlive the other ranks."""
    if not _agent_has_store():
        with contextlib.suppress(distributed.DistError):
            ranks = range(1, _number("WORLD_SIZE"))
            store.wait([f"ended {rank}" for rank in ranks], timedelta(seconds=_ENDS_S))


def serve(rank: int, *, device: str = "cpu", local_rank: int = 0, limit_s: float = LIMIT_S) -> None:
    """On every rank but 0: runs what rank 0 sends, until it closes."""
    store = _store(2 * limit_s + START_S)
    store.set(f"here {rank}", "")
    while not store.check([BEGIN]):
        time.sleep(_POLL_S)
    if store.get(BEGIN) == b"end":
        store.set(f"ended {rank}", "")
        return
    watch = _Watch(store, rank)
    watch.start()
    _join(store, device, local_rank, limit_s)
    calls = 0
    while True:
        calls += 1
        key = f"call {calls} {rank}"
        while not store.check([key]):
            time.sleep(_POLL_S)
        message = store.get(key)
        store.delete_key(key)
        if message == _END:
            store.set(f"ended {rank}", "")
            return
        watch.call = calls
        function, arguments = pickle.loads(message)
        store.set(f"answer {calls} {rank}", pickle.dumps(run_on_rank(function, arguments)))


class _Watch(threading.Thread):
    """Counts up in the store, and writes this rank's stacks there if rank 0 asks for those of the current call."""

    def __init__(self, store: distributed.Store, rank: int) -> None:
        super().__init__(name="goldsmith-ranks", daemon=True)
        self._store, self._rank, self.call = store.clone(), rank, 0

    def run(self) -> None:
        beats, written = 0, 0
        with contextlib.suppress(RuntimeError):  # the store has ended, and with it the command
            while True:
                self._store.set(f"beat {self._rank}", str(beats))
                call, beats = self.call, beats + 1
                if call > written and self._store.check([f"stacks {call}"]):
                    self._store.set(f"stack {call} {self._rank}", stacks.own_text())
                    written = call
                time.sleep(_BEAT_S)


def _store(limit_s: float) -> distributed.Store:
    """A connection to the launcher's store; without torchrun's agent, rank 0 holds it."""
    host = _number("RANK") == 0 and not _agent_has_store()
    store = distributed.TCPStore(
        _variable("MASTER_ADDR"), _number("MASTER_PORT"), None, host, timedelta(seconds=limit_s),
        wait_for_workers=False,
    )  # fmt: skip
    attempt = _variable("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"{STORE}/{attempt}", store)


def _agent_has_store() -> bool:
    return _variable("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _variable(name: str, default: str = "") -> str:
    """One of the launcher's variables."""
    return os.environ.get(name, default)


def _number(name: str) -> int:
    return int(_variable(name))


def _join(store: distributed.Store, device: str, local_rank: int, limit_s: float) -> int:
    """Joins the launcher's process group; returns the number of ranks."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if not distributed.is_initialized():
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=distributed.PrefixStore("group", store.clone()),
            rank=_number("RANK"),
            world_size=_number("WORLD_SIZE"),
            timeout=timedelta(seconds=2 * limit_s + 5),
        )
    return distributed.get_world_size()
