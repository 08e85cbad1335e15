"""Presence: notices within seconds that a rank has ended, whatever the others are waiting for.

A thread of each rank counts up under the rank's key in the store that all ranks reach. A rank has ended if

- it left a message: an error of its own,
- its process is gone, which ranks on the same machine see at once,
- its count has stood still for LIMIT_S. Rank 0 reads all counts, and the others only rank 0's, so that a second of a
  thousand ranks costs the store a few thousand requests.

The thread that notices it tells the other ranks through the store. The main thread then has GRACE_S to end in order:
gloo's collectives fail when a peer is gone. NCCL's do not, so the thread ends the process afterwards.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ....core.json_values import parse_json

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_S, LIMIT_S, GRACE_S = 1.0, 15.0, 5.0
ENDED = "ended"


class Process(NamedTuple):
    """A rank's process; `machine` is equal for processes that see one another in /proc."""

    machine: str
    host: str
    number: int

    @classmethod
    def this(cls) -> Process:
        try:
            space = os.readlink("/proc/self/ns/pid")
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            space = boot = ""
        return cls(f"{boot} {space}" if boot else "", socket.gethostname(), os.getpid())

    @property
    def place(self) -> str:
        return f"process {self.number} on {self.host}"

    def gone(self) -> bool:
        """Whether the process has ended, or is a zombie. Only for processes of this machine."""
        try:
            state = Path(f"/proc/{self.number}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return True
        return state in ("Z", "X")


class Notice(NamedTuple):
    """Which rank ended the run, and its message."""

    rank: int
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.message}"


class Presence:
    """Watches the ranks from a thread of its own, with a connection of its own to the store."""

    def __init__(self, store: Store, rank: int, processes: Sequence[Process], *, first_holds_store: bool = False):
        self._store, self._rank, self._processes = store, rank, processes
        self._first_holds_store = first_holds_store  # without torchrun, whose agent outlives the ranks
        self.exchanges = 0  # how many exchanges this rank has begun; the others see it
        self.notice: Notice | None = None
        self.abandon: list[Callable[[Notice], None]] = []  # called before the process ends in a collective
        self._noticed, self._closed = threading.Event(), threading.Event()
        self._here = [r for r, p in enumerate(processes) if p.machine and p.machine == processes[rank].machine]
        self._lock = threading.Lock()  # `leave` may run in the main thread while the watch reads
        self._counts: dict[int, tuple[bytes, float]] = {}
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="goldsmith-ranks", daemon=True)

    def start(self) -> None:
        """Begins to watch; every rank has created its Presence."""
        self._thread.start()

    def wait(self, seconds: float) -> Notice | None:
        """The notice, waiting for it at most this long."""
        self._noticed.wait(seconds)
        return self.notice

    def leave(self, message: str) -> Notice:
        """Ends the run on all ranks with this message; returns the notice that came first, which may be another's."""
        notice = self._tell(Notice(self._rank, message))
        self._closed.set()
        return notice

    def close(self) -> None:
        """Stops watching, at the end of a run that every rank has reached."""
        self._closed.set()
        with self._lock:
            self._store.set(f"finished/{self._rank}", "")

    def behind(self) -> list[int]:
        """The ranks that have begun the fewest exchanges: those for which the others wait."""
        with self._lock:
            begun = [int(value.split()[1]) for value in self._store.multi_get(self._keys(range(len(self._processes))))]
        return [rank for rank, number in enumerate(begun) if number == min(begun)]

    def _keys(self, ranks: Sequence[int]) -> list[str]:
        return [f"beat/{rank}" for rank in ranks]

    def _beat(self) -> None:
        self._beats += 1
        with self._lock:
            self._store.set(f"beat/{self._rank}", f"{self._beats} {self.exchanges}")

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                notice = self._look()
            except Exception as error:  # noqa: BLE001  the store raises several kinds; all mean that it is gone
                if self._closed.is_set():
                    return
                notice = self._lost(error)
            if notice is not None:
                self._tell(notice)
                break
        if self._closed.wait(GRACE_S) or self.notice is None:
            return
        for call in self.abandon:
            call(self.notice)
        os._exit(2)  # the main thread waits in a collective that nothing can end

    def _lost(self, error: Exception) -> Notice:
        """Who ended if the store no longer answers: the connections of a process close a moment before it is gone."""
        if self._first_holds_store and 0 in self._here:
            until = time.monotonic() + GRACE_S
            while not (ended := self._processes[0].gone()) and time.monotonic() < until:
                time.sleep(0.02)
            if ended:
                return self._gone(0)
        holder = "or torchrun's agent, which holds" if not self._first_holds_store else "holds"
        return Notice(0, f"{holder} the ranks' store, which no longer answers ({_line(error)})")

    def _look(self) -> Notice | None:
        """The rank that has ended, if one has; counts up before."""
        gone = [rank for rank in self._here if self._processes[rank].gone()]
        if self._store_is_gone(gone):
            return self._gone(0)
        self._beat()
        with self._lock:
            if self._store.check([ENDED]):
                return Notice(*parse_json(self._store.get(ENDED)))
        watched = range(len(self._processes)) if self._rank == 0 else [0]
        with self._lock:
            values = self._store.multi_get(self._keys(watched))
        now = time.monotonic()
        for rank, value in zip(watched, values, strict=True):
            if self._counts.get(rank, (None, 0.0))[0] != value:
                self._counts[rank] = value, now
        for rank in [*gone, *(rank for rank in watched if now - self._counts[rank][1] > LIMIT_S)]:
            with self._lock:
                if self._store.check([f"finished/{rank}"]):
                    continue
                if self._store.check([ENDED]):  # it left a message between the two looks
                    return Notice(*parse_json(self._store.get(ENDED)))
            if rank in gone:
                return self._gone(rank)
            return Notice(rank, f"({self._processes[rank].place}) has not answered for {LIMIT_S:.0f} s")
        return None

    def _store_is_gone(self, gone: Sequence[int]) -> bool:
        """Whether rank 0 held the store and has ended; torch prints a stack trace for each request to such a store."""
        return self._first_holds_store and 0 in gone

    def _gone(self, rank: int) -> Notice:
        return Notice(rank, f"({self._processes[rank].place}) has ended without a message; was it killed?")

    def _tell(self, notice: Notice) -> Notice:
        """Keeps and returns the first notice of all ranks, or of this one if the store cannot be reached."""
        try:
            if self._store_is_gone([notice.rank]) and self._rank != 0:
                raise ConnectionError
            with self._lock:
                first = self._store.compare_set(ENDED, "", json.dumps(notice))
            notice = Notice(*parse_json(first))
        except Exception:  # noqa: BLE001  the store is gone, as in _watch
            pass
        self.notice = self.notice or notice
        self._noticed.set()
        return self.notice


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
