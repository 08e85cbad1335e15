"""A pool of worker processes: requests go out, replies come back, and the death of a worker is a reply too."""

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

PATIENCE = 10.0  # seconds that workers get to answer after a Ctrl-C was passed on to them
GRACE = 2.0  # seconds between asking a run to end because its time is up, and killing its process
LAST_WORDS = 100_000  # bytes of stderr read from a dead worker; deep stacks and lists of modules are long
LIBRARY_PATHS = ("site-packages", "/goldsmith/", "<frozen", "lib/python3")  # parts of the paths of frames to skip


@dataclass(frozen=True)
class Died:
    """How a worker died: the signal or exit status, and the last of its stderr."""

    how: str
    stderr: str

    @property
    def frame(self) -> str:
        """The innermost frame outside torch, triton and goldsmith in faulthandler's report, or ""."""
        for path, line, function in _FRAME.findall(self.stderr):
            if not any(part in path for part in LIBRARY_PATHS):
                return f"in {function} ({path}, line {line})"
        return ""

    @property
    def last_line(self) -> str:
        """The last line of stderr that is not part of faulthandler's report."""
        output, faulted, _ = self.stderr.partition("Fatal Python error")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        if not faulted:  # the report may be longer than the bytes read, which then hold no first line of it
            lines = [line for line in lines if not line.startswith(_REPORT)]
        return lines[-1][:200] if lines else ""


_REPORT = ("File ", "Thread 0x", "Current thread 0x", "Extension modules: ", "Garbage-collecting", "<no Python frame>")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class WorkersFailed(RuntimeError):
    """No worker could be started; the text is the last one's stderr."""


@dataclass
class _Worker:
    number: int
    inbox: queue.Queue[tuple[_Worker, WorkerReply | None]]
    arguments: tuple[str, ...]
    threads: int
    job: WorkerRequest | None = None
    ready: bool = False
    stderr_before: int = 0  # bytes of stderr written before the present job
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
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends its workers
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                try:
                    self.inbox.put((self, json.loads(line)))
                except json.JSONDecodeError:
                    break  # the worker died in the middle of a line
        self.process.wait()
        self.inbox.put((self, None))

    def send(self, message: Mapping[str, object]) -> None:
        if self.process.stdin is None:
            return
        self.stderr_before = os.fstat(self.stderr.fileno()).st_size
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # the worker died; the reader reports it

    def death(self) -> Died:
        status = self.process.returncode
        how = f"with status {status}"
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = "unknown"
            how = f"by signal {-status} ({name})"
        self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(self.stderr_before, self.stderr.tell() - LAST_WORDS))  # skips the output of earlier jobs
        stderr = self.stderr.read().decode(errors="replace").strip()
        self.close()
        return Died(how, stderr)

    def close(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # its buffer may hold data that nobody reads any more
                    pipe.close()


class Pool:
    """Up to `size` workers, started on demand; a context manager that leaves no process behind."""

    def __init__(
        self,
        size: int,
        *,
        arguments: tuple[str, ...] = (),
        threads: int = 1,
        on_progress: Callable[[ProgressMessage], None] | None = None,
        forward_ctrl_c: bool = False,
        until: Callable[[], float | None] = lambda: None,
    ) -> None:
        """on_progress    called with each progress message of a worker
        forward_ctrl_c  the first Ctrl-C goes to busy workers, which answer with partial results; the second ends them
        until           returns the time.monotonic() at which the workers' present run must end, or None. A worker is
                        first asked to end the run, so that it can answer with partial results, and then killed."""
        self.size, self.arguments, self.threads = size, arguments, threads
        self.on_progress, self.forward_ctrl_c, self.interrupted = on_progress, forward_ctrl_c, False
        self.until = until
        # (the deadline that passed, when the workers were asked to end)
        self.asked_to_end: tuple[float, float] | None = None
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
        """Send one request to the first worker and return its reply; raises WorkersFailed if the worker dies."""
        for _, reply in self.run([message]):
            if isinstance(reply, Died):
                raise WorkersFailed(_death(reply))
            return reply
        raise WorkersFailed("no worker answered")

    def run(self, jobs: Iterable[RequestT]) -> Iterator[tuple[RequestT, WorkerReply | Died]]:
        """Yield (job, reply) as jobs finish; for a worker that dies the reply is a `Died`, and a new worker starts."""
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
                died = worker.death()
                if worker.job is None and not worker.ready:
                    if not self.workers:
                        raise WorkersFailed(_death(died))
                    self.size = len(self.workers)  # the other workers go on without it
                    continue
                if worker.job is None:
                    continue
                job, worker.job = cast("RequestT", worker.job), None
                open_jobs -= 1
                yield job, died
            elif "ready" in reply:
                worker.ready = True
            elif "progress" in reply:
                if self.on_progress is not None:
                    self.on_progress(reply["progress"])
            else:
                job, worker.job = cast("RequestT", worker.job), None
                open_jobs -= 1
                yield job, reply

    def _next(self) -> tuple[_Worker, WorkerReply | None]:
        while True:
            try:
                return self.inbox.get(timeout=self._timeout())
            except queue.Empty:
                if self.interrupted:
                    raise KeyboardInterrupt from None  # the run in the worker does not stop
                self._end_overdue_runs()
            except KeyboardInterrupt:
                at_work = [w for w in self.workers if w.job is not None]
                if not self.forward_ctrl_c or self.interrupted or not at_work:
                    raise
                self.interrupted = True
                for worker in at_work:
                    worker.process.send_signal(signal.SIGINT)

    def _timeout(self) -> float | None:
        """Seconds to wait for a message before an overdue run must be ended; None: forever."""
        until = self.until()
        if self.interrupted or until is None:
            return PATIENCE if self.interrupted else None
        now = time.monotonic()
        if self.asked_to_end is not None and self.asked_to_end[0] == until:
            return max(0.01, self.asked_to_end[1] + GRACE - now)
        return max(0.01, until - now)

    def _end_overdue_runs(self) -> None:
        """End a run whose time is up: ask its worker first, and kill the worker if it is still busy after GRACE."""
        until, now = self.until(), time.monotonic()
        if until is None or now < until:
            return
        already = self.asked_to_end is not None and self.asked_to_end[0] == until
        if already and self.asked_to_end is not None and now < self.asked_to_end[1] + GRACE:
            return
        for worker in (w for w in self.workers if w.job is not None):
            if already or not hasattr(signal, "SIGUSR1"):
                worker.process.kill()
            else:
                worker.process.send_signal(signal.SIGUSR1)
        self.asked_to_end = (until, now)

    @property
    def running(self) -> list[WorkerRequest]:
        """The jobs that workers are busy with, oldest worker first."""
        return [w.job for w in self.workers if w.job is not None]


def _death(died: Died) -> str:
    where = f", {died.frame}" if died.frame else ""
    line = died.last_line
    return f"ended {died.how}{where}. " + (f"Its last line: {line}" if line else "It printed nothing more.")
