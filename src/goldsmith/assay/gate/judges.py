"""Judges: several judge processes that share the work. The caller imports neither problem nor candidate."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import IO, Any

from ..execute.raised import frame_of_report
from ..support.deadline import WRITE_STACK
from .bad_problem import BadProblem
from .candidate import Candidate
from .formats.problem_source import ProblemSource, existing
from .isolation.zygote_process import NoZygote, ZygoteProcess
from .judging import GateOptions
from .verdict import REFUSED, Verdict

TRIES = 2  # of a candidate whose judge died
GRACE = 2.0  # seconds in which a judge that closed its connection ends by itself, so that its status is its own
_LONGEST_WAIT = 3600.0  # seconds, because Python refuses to wait for ever by a number
_KEPT = 64 << 10  # bytes of stderr to read
_PATIENCE = 0.5  # seconds in which a judge can say where it stands


class NoJudge(RuntimeError):
    """No judge could be started; the text is the last line that one printed."""


Pair = tuple[ProblemSource, Candidate]


class Judges:
    """Up to `jobs` judges, started when there is work for them. A context manager that leaves no process behind."""

    def __init__(self, jobs: int = 0, options: GateOptions | None = None, *, spares: bool | None = None) -> None:
        """jobs: 0 means one for each core, but at most 8.

        spares: each judge has the next candidate's process started while it judges one, and keeps it until it ends;
        None: on a GPU, where a process has to create a context.
        """
        if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0:
            raise TypeError(f"jobs: expected a number of judges, or 0 for one on each core, got {jobs!r}")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.jobs = jobs or min(cores, 8)
        self.options = options or GateOptions()
        self.options.check()
        self.spares = self.options.device.startswith("cuda") if spares is None else spares
        self.isolation = ""  # a sentence, once a judge has started
        self.inbox: queue.Queue[tuple[_JudgeProcess, dict[str, Any] | None]] = queue.Queue()
        self.processes: list[_JudgeProcess] = []
        self.zygote: ZygoteProcess | None = None  # imports once what all judges need

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.processes.clear()
        if self.zygote is not None:
            self.zygote.close()
            self.zygote = None

    def run(self, pairs: Iterable[Pair]) -> Iterator[tuple[int, Verdict]]:
        """(number, verdict) of each pair of a problem and a candidate, as they are finished.

        Where the options have no seed, all of them share a new one, so that each judge computes a golden once.
        """
        seed = secrets.randbits(31) if self.options.seed is None else self.options.seed
        options = replace(self.options, seed=seed)
        work = deque((number, pair, TRIES) for number, pair in enumerate(pairs))
        while work or any(process.job is not None for process in self.processes):
            self._hand_out(work, options)
            process, reply = self._next()
            if reply is None:
                if process not in self.processes:
                    continue
                self.processes.remove(process)
                how = process.last_words()
                process.close()
                if process.job is None:
                    if not self.processes:
                        raise NoJudge(how)
                    self.jobs = len(self.processes)
                    continue
                number, pair, tries = process.job
                if process.overdue:
                    yield number, _refused(pair, "problem", process.overdue)
                    for job in [each for each in work if each[1][0] == pair[0]]:  # they would wait as long
                        work.remove(job)
                        yield job[0], _refused(job[1], "problem", process.overdue)
                elif tries > 1:
                    work.appendleft((number, pair, tries - 1))
                else:
                    text = f"the judge's process ended with the problem {pair[0].where}: {how}"
                    yield number, _refused(pair, "judge", text)
            elif "ready" in reply:
                process.ready, self.isolation = True, reply["isolation"]
            elif "verdict" in reply and process.job is not None:
                number, process.job = process.job[0], None
                yield number, Verdict.from_json(reply["verdict"])

    def _next(self) -> tuple[_JudgeProcess, dict[str, Any] | None]:
        """The next reply of a judge, or None for one that has ended; ends those whose problem takes too long."""
        limit = self.options.problem_seconds
        while True:
            began = [p.step[1] for p in self.processes if p.step is not None and not p.overdue]
            try:
                until = min(began) + limit - time.monotonic() if began else _LONGEST_WAIT
                return self.inbox.get(timeout=max(0.01, min(until, _LONGEST_WAIT)))
            except queue.Empty:
                for process in self.processes:
                    process.end_overdue_step(limit)

    def check(self, problems: Iterable[ProblemSource]) -> None:
        """Raises BadProblem for the first of these problems that a judge cannot load."""
        problems = list(problems)
        for problem in problems:
            existing(problem.where)
        for verdict in self.in_order([(problem, Candidate("nothing", "")) for problem in problems]):
            if verdict.reason in ("problem", "judge"):
                raise BadProblem(verdict.evidence[0])

    def in_order(self, pairs: Iterable[Pair]) -> Iterator[Verdict]:
        """The verdicts in the order of the pairs, each as soon as it and all before it are there."""
        waiting, following = dict[int, Verdict](), 0
        for number, verdict in self.run(pairs):
            waiting[number] = verdict
            while following in waiting:
                yield waiting.pop(following)
                following += 1

    def _new(self) -> _JudgeProcess:
        try:
            if self.zygote is None or self.zygote.process is not None and self.zygote.process.poll() is not None:
                self.zygote = _new_zygote()
            return _JudgeProcess(self.inbox, self.zygote, self.options.sandbox, spares=self.spares)
        except NoZygote as error:
            raise NoJudge(str(error)) from error

    def _hand_out(self, work: deque[tuple[int, Pair, int]], options: GateOptions) -> None:
        busy = sum(p.job is not None for p in self.processes)
        while len(self.processes) < min(self.jobs, busy + len(work)):
            self.processes.append(self._new())
        for process in self.processes:
            if process.ready and process.job is None and work:
                process.job = work.popleft()
                number, (problem, candidate), _ = process.job
                process.send(
                    {
                        "number": number,
                        "problem": problem.to_json(),
                        "candidate": candidate.to_json(),
                        "options": options.to_json(),
                    }
                )


def _new_zygote() -> ZygoteProcess:
    """What imports once what all judges need. Raises NoZygote.

    With one thread: several judges use several cores, and threads that wait at a barrier lose more than they gain.
    """
    with tempfile.TemporaryFile() as stderr:
        try:
            return ZygoteProcess.start(stderr=stderr, threads=1)
        except NoZygote as error:
            raise NoZygote(", ".join([str(error), *_last_line(stderr)])) from error


def _last_line(stderr: IO[bytes]) -> list[str]:
    """The last line of what a process has written, or none."""
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - 4096))
    return [line.strip()[:300] for line in stderr.read().decode(errors="replace").splitlines() if line.strip()][-1:]


class _JudgeProcess:
    """One judge: a process that the zygote forked, and a thread that reads its replies."""

    def __init__(
        self, inbox: queue.Queue[tuple[_JudgeProcess, dict[str, object] | None]], zygote: ZygoteProcess,
        isolation: str, *, spares: bool,
    ) -> None:  # fmt: skip
        self.inbox, self.zygote = inbox, zygote
        self.job: tuple[int, Pair, int] | None = None
        self.ready = False
        self.status: int | None = None
        self.step: tuple[str, float] | None = None  # of its problem's own code, and when it began
        self.overdue = ""  # a sentence, where that took too long
        self.stderr = tempfile.TemporaryFile()
        self.connection, its = socket.socketpair()
        request: dict[str, object] = {
            "do": "fork",
            "main": f"{__package__}.judge_process:serve",
            "limits": None,
            "sandbox": None,
        }
        request |= {"joins": True, "folder": os.getcwd(), "isolation": isolation, "spares": spares}
        answer = zygote.ask(request, [its.fileno(), self.stderr.fileno()])
        its.close()
        if "problem" in answer:
            raise NoZygote(answer["problem"])
        self.pid: int = answer["pid"]
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        # ValueError: it died in the middle of a line
        with contextlib.suppress(OSError, ValueError), self.connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                reply = json.loads(line)
                if "step" in reply:
                    self.step = (reply["step"], time.monotonic()) if reply["step"] else None
                self.inbox.put((self, reply))
        self.inbox.put((self, None))

    def send(self, message: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # it died; the reader says so
            self.connection.sendall(f"{json.dumps(message)}\n".encode())

    def end_overdue_step(self, limit: float) -> None:
        """Kills the process where a step of its problem's code has taken longer than the limit, and notes where."""
        if self.step is None or self.job is None or self.overdue or time.monotonic() < self.step[1] + limit:
            return
        before, until = self._written, time.monotonic() + _PATIENCE
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, WRITE_STACK)
        while time.monotonic() < until and not (stack := self._printed(before)).endswith("\n"):
            time.sleep(0.02)
        where = frame_of_report(stack)
        self.overdue = f"{self.job[1][0].where}: {self.step[0]} had not ended after {limit:g} s" + (
            f", {where}" if where else ""
        )
        self.overdue += "; if it is only slow, give a larger --problem-seconds (GateOptions(problem_seconds=...))"
        self.end()

    @property
    def _written(self) -> int:
        """Bytes that it has written to stderr."""
        return os.fstat(self.stderr.fileno()).st_size

    def _printed(self, begin: int) -> str:
        """What it has written to stderr, whose position both processes share."""
        return os.pread(self.stderr.fileno(), _KEPT, begin).decode(errors="replace")

    def last_words(self) -> str:
        self.end(GRACE)
        status = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        how = f"status {status}" if status is None or status >= 0 else f"signal {-status}"
        return ", ".join([how, *_last_line(self.stderr)])

    def end(self, grace: float = 0.0) -> None:
        """Kills the process and all that it started; it may end by itself within `grace` seconds."""
        with contextlib.suppress(NoZygote):
            status = self.zygote.ask({"do": "end", "pid": self.pid, "grace": grace})["status"]
            self.status = status if self.status is None else self.status

    def close(self) -> None:
        self.end()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.reader.join()
        self.connection.close()
        self.stderr.close()


def _refused(pair: Pair, reason: str, text: str) -> Verdict:
    return Verdict(REFUSED, reason, pair[1].name, evidence=[text])
