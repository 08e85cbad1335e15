"""Worker processes that may die: requests go out, replies come back, and a fatal signal is a reply like any other."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

from .messages import ProgressMessage, WorkerReply, WorkerRequest

RequestT = TypeVar("RequestT", bound=WorkerRequest)

PATIENCE = 10.0  # seconds after a Ctrl-C that was passed on
GRACE = 2.0  # seconds between asking a run that takes too long to end, and ending its process
LAST_WORDS = 100_000  # bytes of stderr read of a worker that died: deep stacks and long lists of modules stand in it
NOT_THEIRS = ("site-packages", "/goldsmith/", "<frozen", "lib/python3")  # in the paths of frames that are no user's


@dataclass(frozen=True)
class Died:
    """How a worker ended while it worked: the signal or status, and what it last said on stderr."""

    how: str
    words: str

    @property
    def frame(self) -> str:
        """The innermost frame outside torch, triton and goldsmith that faulthandler saw, or nothing."""
        for path, line, function in _FRAME.findall(self.words):
            if not any(part in path for part in NOT_THEIRS):
                return f"in {function} ({path}, line {line})"
        return ""

    @property
    def last_line(self) -> str:
        """What it last said of its own accord: not faulthandler's report."""
        said, faulted, _ = self.words.partition("Fatal Python error")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        if not faulted:  # a report that is longer than what was read of it
            lines = [line for line in lines if not line.startswith(_REPORT)]
        return lines[-1][:200] if lines else ""


_REPORT = ("File ", "Thread 0x", "Current thread 0x", "Extension modules: ", "Garbage-collecting", "<no Python frame>")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class WorkersFailed(RuntimeError):
    """No worker could be started; the text is what the last one said."""


@dataclass
class _Worker:
    number: int
    inbox: queue.Queue[tuple[_Worker, WorkerReply | None]]
    arguments: tuple[str, ...]
    threads: int
    job: WorkerRequest | None = None
    ready: bool = False
    said: int = 0  # bytes of stderr from before its present job
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        environment = dict(os.environ)
        source = str(Path(__file__).resolve().parents[3])  # the folder that holds the package `goldsmith`
        paths = [source, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        self.stderr = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "goldsmith.cli.workers.child", *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                try:
                    self.inbox.put((self, json.loads(line)))
                except json.JSONDecodeError:
                    break  # it died while it wrote
        self.process.wait()
        self.inbox.put((self, None))

    def send(self, message: Mapping[str, object]) -> None:
        if self.process.stdin is None:
            return
        self.said = os.fstat(self.stderr.fileno()).st_size
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it died; the reader says so

    def obituary(self) -> Died:
        status = self.process.returncode
        how = f"with status {status}"
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = "unknown"
            how = f"by signal {-status} ({name})"
        self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(self.said, self.stderr.tell() - LAST_WORDS))  # what other targets said is not its own
        words = self.stderr.read().decode(errors="replace").strip()
        self.close()
        return Died(how, words)

    def close(self) -> None:
        """End the process if it still runs, and let go of its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was still to be written to it
                    pipe.close()


class Pool:
    """Up to `size` workers, started when there is work; a context manager that leaves no process behind."""

    def __init__(
        self,
        size: int,
        *,
        arguments: tuple[str, ...] = (),
        threads: int = 1,
        told: Callable[[ProgressMessage], None] | None = None,
        passes_on: bool = False,
        until: Callable[[], float | None] = lambda: None,
    ) -> None:
        """told: is given what a worker says of its progress; passes_on: the first Ctrl-C goes to the workers at work,
        which then answer with what they know, and the second ends them; until: when the workers' present run is to be
        ended, by time.monotonic(): they are asked first, so that they can answer with what they know."""
        self.size, self.arguments, self.threads = size, arguments, threads
        self.told, self.passes_on, self.interrupted = told, passes_on, False
        self.until = until
        self.asked: tuple[float, float] | None = None  # the time that was up, and when the workers were asked
        self.inbox: queue.Queue[tuple[_Worker, WorkerReply | None]] = queue.Queue()
        self.workers: list[_Worker] = []
        self.started = 0

    def __enter__(self) -> Pool:
        self._start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()

    def _start(self) -> None:
        self.started += 1
        self.workers.append(_Worker(self.started, self.inbox, self.arguments, self.threads))

    def ask(self, message: WorkerRequest) -> WorkerReply:
        """One request, answered by the first worker; raises WorkersFailed when it dies over it."""
        for _, reply in self.run([message]):
            if isinstance(reply, Died):
                raise WorkersFailed(_epitaph(reply))
            return reply
        raise WorkersFailed("no worker answered")

    def run(self, jobs: Iterable[RequestT]) -> Iterator[tuple[RequestT, WorkerReply | Died]]:
        """(job, reply) as they are finished; a worker that dies gives `Died`, and another takes its place."""
        pending = deque(jobs)
        open_jobs = len(pending)
        while open_jobs:
            busy = sum(w.job is not None for w in self.workers)
            while len(self.workers) < self.size and len(self.workers) < busy + len(pending):
                self._start()
            for worker in self.workers:
                if worker.ready and worker.job is None and pending:
                    worker.job = pending.popleft()
                    worker.send({"id": id(worker.job), **worker.job})
            worker, reply = self._next()
            if reply is None:
                if worker not in self.workers:
                    continue
                self.workers.remove(worker)
                died = worker.obituary()
                if worker.job is None and not worker.ready:
                    if not self.workers:
                        raise WorkersFailed(_epitaph(died))
                    self.size = len(self.workers)  # the others go on without it
                    continue
                if worker.job is None:
                    continue
                job, worker.job = cast("RequestT", worker.job), None
                open_jobs -= 1
                yield job, died
            elif "ready" in reply:
                worker.ready = True
            elif "progress" in reply:
                if self.told is not None:
                    self.told(reply["progress"])
            else:
                job, worker.job = cast("RequestT", worker.job), None
                open_jobs -= 1
                yield job, reply

    def _next(self) -> tuple[_Worker, WorkerReply | None]:
        while True:
            try:
                return self.inbox.get(timeout=self._wait())
            except queue.Empty:
                if self.interrupted:
                    raise KeyboardInterrupt from None  # what runs there does not stop
                self._end()
            except KeyboardInterrupt:
                at_work = [w for w in self.workers if w.job is not None]
                if not self.passes_on or self.interrupted or not at_work:
                    raise
                self.interrupted = True
                for worker in at_work:
                    worker.process.send_signal(signal.SIGINT)

    def _wait(self) -> float | None:
        """Seconds until something must be done though nobody says anything."""
        until = self.until()
        if self.interrupted or until is None:
            return PATIENCE if self.interrupted else None
        now = time.monotonic()
        if self.asked is not None and self.asked[0] == until:
            return max(0.01, self.asked[1] + GRACE - now)
        return max(0.01, until - now)

    def _end(self) -> None:
        """The time of a run is up: its worker is asked to end it, and ended where that was no use."""
        until, now = self.until(), time.monotonic()
        if until is None or now < until:
            return
        asked = self.asked is not None and self.asked[0] == until
        if asked and self.asked is not None and now < self.asked[1] + GRACE:
            return
        for worker in (w for w in self.workers if w.job is not None):
            if asked or not hasattr(signal, "SIGUSR1"):
                worker.process.kill()
            else:
                worker.process.send_signal(signal.SIGUSR1)
        self.asked = (until, now)

    @property
    def running(self) -> list[WorkerRequest]:
        """What the workers are at, oldest first."""
        return [w.job for w in self.workers if w.job is not None]


def _epitaph(died: Died) -> str:
    where = f", {died.frame}" if died.frame else ""
    said = died.last_line
    return f"ended {died.how}{where}. " + (f"Its last line: {said}" if said else "It said nothing more.")
