"""A pool of worker processes: requests go out, replies come back, and the death of a worker is a reply too."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, cast

from ...assay.gate.isolation.protocol import NONCE_BYTES, Closed, Connection, Malformed
from ...assay.gate.isolation.zygote_process import NoZygote, ZygoteProcess
from ...assay.support.deadline import WRITE_STACK

if TYPE_CHECKING:
    from .messages import ProgressMessage, WorkerReply, WorkerRequest

RequestT = TypeVar("RequestT", bound="WorkerRequest")

_MAIN = "goldsmith.cli.workers.child:serve"
_PRELOADED = ("torch", "goldsmith.cli.workers.child", "goldsmith.assay.gate.isolation.child")
PATIENCE = 10.0  # seconds that workers get to answer after a Ctrl-C was passed on to them
STEP_LIMIT = 300.0  # seconds
GRACE = 2.0  # seconds between asking a run to end because its time is up, and killing its process
_PATIENCE_OF_A_STEP, _WRITING = 0.5, 0.05  # seconds until a stack is begun, and for writing it
LAST_WORDS = 100_000  # bytes of stderr read from a dead worker; deep stacks and lists of modules are long
LIBRARY_PATHS = ("site-packages", "/goldsmith/", "<frozen", "lib/python3")  # parts of the paths of frames to skip


@dataclass(frozen=True)
class Died:
    """How a worker died: the signal or exit status, and the last of its stderr.

    overdue    a sentence, where it was ended because a step of the user's own code beside the judge took too long
    signal     its number, or 0
    ended      why the candidate's process was ended, as `CandidateEnded.status`; "" where it ended by itself
    """

    how: str
    stderr: str
    overdue: str = ""
    signal: int = 0
    ended: str = ""

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


class StepOverdue(RuntimeError):
    """A step of the user's own code beside the judge took too long; the text says which, and where it stood."""


class _Worker:
    """One worker, forked from the zygote, with the request that it works on."""

    def __init__(
        self, number: int, inbox: queue.Queue[tuple[_Worker, WorkerReply | None]], zygote: ZygoteProcess
    ) -> None:
        self.number, self.inbox, self.zygote = number, inbox, zygote
        self.job: WorkerRequest | None = None
        self.group: object = None  # of the latest job
        self.since = 0.0  # when it got the request
        self.ready = False
        self.broken = ""  # what it sent that is no reply
        self.step: tuple[str, float] | None = None  # of the user's own code beside the judge, and when it began
        self.overdue = ""  # how that took too long
        self.stderr_before = 0  # bytes of stderr written before the present job
        self.requests = 0
        self.stderr = tempfile.TemporaryFile()
        nonce = secrets.token_bytes(NONCE_BYTES)
        ours, its = socket.socketpair()
        request = {"do": "fork", "main": _MAIN, "nonce": nonce.hex(), "limits": None, "sandbox": None, "joins": True}
        answer = zygote.ask(request, [its.fileno(), self.stderr.fileno()])
        its.close()
        if "problem" in answer:
            raise NoZygote(answer["problem"])
        self.pid: int = answer["pid"]
        self.connection = Connection(ours, nonce, limit=0)
        self.closed = False
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Hands over replies. Whatever is none, or answers no open request, ends the worker."""
        try:
            while True:
                number, reply, _ = self.connection.receive()
                known = isinstance(reply, dict) and number == (0 if "ready" in reply else self.requests)
                if not known:
                    raise Malformed("something that is no reply to its request")
                if "step" in reply:
                    self.step = (reply["step"], time.monotonic()) if reply["step"] else None
                self.inbox.put((self, cast("WorkerReply", reply)))
        except Closed:
            pass
        except Malformed as error:
            self.broken = f"and sent {error}"
        self.inbox.put((self, None))

    def send(self, message: Mapping[str, object]) -> None:
        self.stderr_before = os.fstat(self.stderr.fileno()).st_size
        self.since, self.requests = time.monotonic(), self.requests + 1
        with contextlib.suppress(Closed):  # the worker died; the reader reports it
            self.connection.send(self.requests, message)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def death(self) -> Died:
        status = self.end(GRACE) or 0
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if self.broken:
            how = self.broken
        elif number:
            known = {s.value: s.name for s in signal.Signals}
            how = f"by signal {number} ({known.get(number, 'unknown')})"
        else:
            how = f"with status {os.WEXITSTATUS(status)}"
        self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(self.stderr_before, self.stderr.tell() - LAST_WORDS))  # skips the output of earlier jobs
        stderr = self.stderr.read().decode(errors="replace").strip()
        self.close()
        died = Died(how, stderr, signal=number)
        return replace(died, overdue=f"{self.overdue}, {died.frame}" if self.overdue and died.frame else self.overdue)

    def end_overdue_step(self, limit: float) -> None:
        """Kills the process where a step has taken longer than the limit; before, it writes its stack."""
        if self.step is None or time.monotonic() < self.step[1] + limit or self.overdue:
            return
        self.overdue = f"{self.step[0]} had not ended after {limit:g} s"
        written, until = os.fstat(self.stderr.fileno()).st_size, time.monotonic() + _PATIENCE_OF_A_STEP
        self.signal(WRITE_STACK)
        while time.monotonic() < until and os.fstat(self.stderr.fileno()).st_size == written:
            time.sleep(0.02)
        time.sleep(_WRITING)
        self.signal(signal.SIGKILL)

    def end(self, grace: float = 0.0) -> int | None:
        """Kill the process, and all that it started; its wait status."""
        with contextlib.suppress(NoZygote):
            return self.zygote.ask({"do": "end", "pid": self.pid, "grace": 0.0 if self.broken else grace})["status"]
        return None

    def close(self) -> None:
        """Kill the process if it still runs, and close its files."""
        if self.closed:
            return
        self.closed = True
        self.end()
        with contextlib.suppress(OSError):
            self.connection.socket.shutdown(socket.SHUT_RDWR)
        self.reader.join()
        self.connection.socket.close()
        self.stderr.close()


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
        step_limit: float = STEP_LIMIT,
    ) -> None:
        """on_progress    called with each progress message of a worker
        forward_ctrl_c  the first Ctrl-C goes to busy workers, which answer with partial results; the second ends them
        until           returns the time.monotonic() at which the workers' present run must end, or None. A worker is
                        first asked to end the run, so that it can answer with partial results, and then killed
        step_limit      seconds for one step of the user's own code beside the judge: an import, the inputs of a case,
                        or one call of a golden"""
        self.size, self.arguments, self.threads = size, arguments, threads
        self.zygote: ZygoteProcess | None = None
        self.zygote_stderr = tempfile.TemporaryFile()
        self.on_progress, self.forward_ctrl_c, self.interrupted = on_progress, forward_ctrl_c, False
        self.until, self.step_limit = until, step_limit
        self.pending: list[tuple[object, WorkerRequest]] = []  # (group, job) that no worker has yet
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
        if self.zygote is not None:
            self.zygote.close()
        self.zygote_stderr.close()

    def _start(self) -> None:
        self.started += 1
        try:
            if self.zygote is None:
                interpret = "--interpret" in self.arguments
                self.zygote = ZygoteProcess.start(
                    _PRELOADED, stderr=self.zygote_stderr, threads=self.threads, interpret=interpret
                )
            self.workers.append(_Worker(self.started, self.inbox, self.zygote))
        except NoZygote as error:
            self.zygote_stderr.seek(0)
            words = self.zygote_stderr.read()[-LAST_WORDS:].decode(errors="replace").strip()
            raise WorkersFailed(_death(Died(str(error), words))) from error

    def ask(self, message: WorkerRequest) -> WorkerReply:
        """Send one request to the first worker and return its reply; raises WorkersFailed if the worker dies."""
        for _, reply in self.run([message]):
            if isinstance(reply, Died) and reply.overdue:
                raise StepOverdue(reply.overdue)
            if isinstance(reply, Died):
                raise WorkersFailed(_death(reply))
            return reply
        raise WorkersFailed("no worker answered")

    def run(
        self, jobs: Iterable[RequestT], *, group: Callable[[RequestT], object] = id
    ) -> Iterator[tuple[RequestT, WorkerReply | Died]]:
        """Yield (job, reply) as jobs finish; for a worker that dies the reply is a `Died`, and a new worker starts.

        group   of a job: one worker gets jobs of one group as long as there are any, because they use the same compiled
                kernels, which otherwise every worker would compile at the same time
        """
        pending = [(group(job), job) for job in jobs]
        self.pending = cast("list[tuple[object, WorkerRequest]]", pending)
        while pending or any(w.job is not None for w in self.workers):
            busy = sum(w.job is not None for w in self.workers)
            while len(self.workers) < self.size and len(self.workers) < busy + len(pending):
                self._start()
            for worker in self.workers:
                if worker.ready and worker.job is None and pending:
                    worker.group, worker.job = pending.pop(self._choice(worker, [each for each, _ in pending]))
                    worker.send(worker.job)
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
                yield job, died
            elif "ready" in reply:
                worker.ready = True
            elif "step" in reply:
                pass  # `_timeout` looks at it
            elif "progress" in reply:
                if self.on_progress is not None:
                    self.on_progress(reply["progress"])
            else:
                job, worker.job = cast("RequestT", worker.job), None
                died_there = reply.get("died")
                yield job, reply if died_there is None else Died(**died_there)

    def leave_out(self, unwanted: Callable[[RequestT], bool]) -> None:
        """Drops the jobs of the present `run` that no worker has yet."""
        self.pending[:] = [(group, job) for group, job in self.pending if not unwanted(cast("RequestT", job))]

    def _choice(self, worker: _Worker, groups: Sequence[object]) -> int:
        """The number of the worker's next job, among those of these groups: the first of its own group, otherwise of a
        group on which no worker is, otherwise of the group with most jobs."""
        left = Counter(groups)
        begun = {w.group for w in self.workers if w.job is not None}
        wanted = min(left, key=lambda g: (g != worker.group, g in begun, -left[g] if g in begun else 0))
        return groups.index(wanted)

    def _next(self) -> tuple[_Worker, WorkerReply | None]:
        while True:
            try:
                return self.inbox.get(timeout=self._timeout())
            except queue.Empty:
                if self.interrupted:
                    raise KeyboardInterrupt from None  # the run in the worker does not stop
                for worker in self.workers:
                    worker.end_overdue_step(self.step_limit)
                self._end_overdue_runs()
            except KeyboardInterrupt:
                at_work = [w for w in self.workers if w.job is not None]
                if not self.forward_ctrl_c or self.interrupted or not at_work:
                    raise
                self.interrupted = True
                for worker in at_work:
                    worker.signal(signal.SIGINT)

    def _timeout(self) -> float | None:
        """Seconds to wait for a message before an overdue run or step must be ended; None: forever."""
        if self.interrupted:
            return PATIENCE
        until = self.until()
        ends = [w.step[1] + self.step_limit for w in self.workers if w.step is not None and not w.overdue]
        if until is not None:
            asked = self.asked_to_end is not None and self.asked_to_end[0] == until
            ends.append(self.asked_to_end[1] + GRACE if asked and self.asked_to_end is not None else until)
        return max(0.01, min(ends) - time.monotonic()) if ends else None

    def _end_overdue_runs(self) -> None:
        """End a run whose time is up: ask its worker first, and kill the worker if it is still busy after GRACE."""
        until, now = self.until(), time.monotonic()
        if until is None or now < until:
            return
        already = self.asked_to_end is not None and self.asked_to_end[0] == until
        if already and self.asked_to_end is not None and now < self.asked_to_end[1] + GRACE:
            return
        for worker in (w for w in self.workers if w.job is not None):
            worker.signal(signal.SIGKILL if already else WRITE_STACK)
        self.asked_to_end = (until, now)

    @property
    def running(self) -> list[WorkerRequest]:
        """The jobs that workers are busy with, oldest worker first."""
        return [w.job for w in self.workers if w.job is not None]


def _death(died: Died) -> str:
    where = f", {died.frame}" if died.frame else ""
    line = died.last_line
    return f"ended {died.how}{where}. " + (f"Its last line: {line}" if line else "It printed nothing more.")


def overdue_sentence(name: str, how: str) -> str:
    """What to say of a target whose own code beside the judge took too long."""
    return f"{name}: {how}. If it is only slow, give a larger --limit."
