"""A pytest session in a child process, which goes on in another one where a kernel ends it.

A kernel that calls `os._exit(0)`, or C's `exit`, ends the process that runs the tests, and its status would be a
success. The parent waits, and ends the child where one run of a candidate takes too long. Then the test in which the
child ended has failed, and another child repeats the reports so far and runs the tests that are left. The parent forks
before tests are collected, and only where pytest is the program itself: not inside another program, an xdist worker or
a coverage run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import pytest

SECONDS = 300.0  # after which a run of a candidate is ended
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_FAILED = 1  # pytest's status where tests failed
_POLL, _PAUSE = 0.5, 0.02  # seconds: between looks at a child that tells nothing, and at one that can tell no more
_BEGAN = struct.Struct("d")
_TAIL = 2000  # characters of what a test had printed
_LONGEST = 64 << 20  # bytes of a line, which no report has


@dataclass
class _Record:
    """What the processes of a session have told: reports by test, as JSON, and how each lost test ended."""

    reports: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    printed: dict[str, tuple[str, str]] = field(default_factory=dict)


class RunClock:
    """When the present run of a candidate began, and its name, in memory that the parent reads."""

    def __init__(self) -> None:
        self.memory, self.owner = mmap.mmap(-1, 1024), 0

    def begin(self, case: str, probe: str, run: str) -> None:
        if os.getpid() != self.owner:  # a process that a test forked
            return
        text = f"run {run!r} of probe {probe} (case {case})".encode(errors="replace")[: 1000 - _BEGAN.size]
        self.memory[:] = (_BEGAN.pack(time.monotonic()) + text).ljust(len(self.memory), b"\0")

    def end(self) -> None:
        if os.getpid() == self.owner:
            self.memory[: _BEGAN.size] = _BEGAN.pack(0.0)

    def over(self, seconds: float) -> str:
        """The name of the present run if it takes longer, or ""."""
        (began,) = _BEGAN.unpack(self.memory[: _BEGAN.size])
        text = self.memory[_BEGAN.size :].rstrip(b"\0").decode(errors="replace")
        return text if began and seconds and time.monotonic() - began > seconds else ""


def run_in_child(config: pytest.Config) -> int | None:
    """Forks. The child gets None, and runs the session. The parent gets the status of the session when it has ended."""
    if not _possible(config):
        return None
    record = _Record()
    while True:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        clock = RunClock()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            clock.owner = os.getpid()
            with contextlib.suppress(OSError, AttributeError):  # systems without prctl
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            config.pluginmanager.register(_Child(config, writing, clock, record), "goldsmith-session")
            return None
        os.close(writing)
        status = _SessionProcess(config, pid, reading, clock).status(record)
        if status is not None:
            return status


def _possible(config: pytest.Config) -> bool:
    program = os.path.basename(sys.argv[0])
    itself = program in ("pytest", "py.test") or program == "__main__.py" and "pytest" in sys.argv[0]
    return (
        itself
        and hasattr(os, "fork")
        and list(config.invocation_params.args) == sys.argv[1:]
        and not hasattr(config, "workerinput")
        and not config.option.collectonly
        and threading.active_count() == 1
        and sys.gettrace() is None
        and "coverage" not in sys.modules
    )


class _Child:
    """Tells the parent what was collected, what began, what has reported, and that the session is over.

    Tests that an earlier process of the session has run are not run again: their reports are repeated.
    """

    def __init__(self, config: pytest.Config, pipe: int, clock: RunClock, record: _Record) -> None:
        self.config, self.pipe, self.clock, self.record = config, pipe, clock, record

    def _tell(self, word: str, value: object) -> None:
        data = (json.dumps([word, value], default=str) + "\n").encode()
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self.pipe, data) :]

    def _known(self, nodeid: str) -> bool:
        return nodeid in self.record.reports or nodeid in self.record.lost

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: not self._known(item.nodeid))  # no fixture lives while reports are repeated

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell("collected", len(session.items))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self._known(item.nodeid):
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        if item.nodeid in self.record.reports:
            for data in self.record.reports[item.nodeid]:
                if isinstance(text := data.get("longrepr"), list):  # of a skipped test; pytest takes a tuple only
                    data["longrepr"] = tuple(text)
                yield self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            return
        names, printed = ("Captured stdout", "Captured stderr"), self.record.printed[item.nodeid]
        sections = [(f"{name} call", text) for name, text in zip(names, printed, strict=True) if text]
        yield pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", self.record.lost[item.nodeid],
            "call", sections,
        )  # fmt: skip

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("begun", nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if _distributed(self.config):
            return
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self._tell("report", [report.nodeid, data])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell("reported", nodeid)

    def pytest_enter_pdb(self) -> None:
        self._tell("stopped", "")  # a person may think for as long as it takes

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._tell("finished", int(exitstatus))


class _SessionProcess:
    """The parent's view of a session in a child process."""

    def __init__(self, config: pytest.Config, pid: int, reading: int, clock: RunClock) -> None:
        self.config, self.pid, self.reading, self.clock = config, pid, reading, clock
        self.seconds: float = config.getoption("--assay-seconds")
        self.collected, self.begun, self.finished, self.asked, self.late = 0, "", False, False, ""
        self.reports: dict[str, list[dict[str, object]]] = {}
        self.reported: list[str] = []

    def status(self, record: _Record) -> int | None:
        """The status of the session when its process has ended, or None where it goes on in another one."""
        code = self._ended()
        whole = len(self.reported) >= self.collected or _distributed(self.config)
        if self.finished and (code != 0 or whole):
            return code
        if not self.finished and not self.collected and code != 0:
            return code  # pytest itself has said why
        during = self.begun if self.begun not in self.reported[-1:] else ""
        new = [test for test in self.reported if test not in record.reports]
        goes_on = bool(during) and not (self.finished or self.asked or _distributed(self.config))
        record.reports |= {test: self.reports.get(test, []) for test in new}
        how = f"ended with status {code}" if not self.late else f"was ended: {self.late} took {self.seconds:g} s"
        out, err = self._say(
            f"goldsmith: the process of this session {how}{f' during {during}' if during else ''}, when "
            f"{len(self.reported)} of {self.collected} tests had reported. "
            + ("The session goes on in another process." if goes_on else "The session has failed.")
        )
        if goes_on:
            record.lost[during] = f"the process that ran this test {how}"
            record.printed[during] = out[-_TAIL:], err[-_TAIL:]
            return None
        return code or _FAILED

    def _ended(self) -> int:
        """Reads what the child tells until it has ended; its status as a shell gives it."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.asked = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

        def asked(number: int, frame: FrameType | None) -> None:  # a terminal sends SIGINT to both
            self.asked = True

        handlers = {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGINT: asked}
        before = [(number, signal.signal(number, handler)) for number, handler in handlers.items()]
        text, status, gone, told = b"", 0, 0, True
        while told or not gone:
            if not gone:
                gone, status = os.waitpid(self.pid, os.WNOHANG)
            ready = bool(select.select([self.reading], [], [], 0 if gone else _POLL)[0])
            data = os.read(self.reading, 1 << 16) if ready else b""
            told = bool(data)  # a process that it left may hold the pipe open
            *lines, text = (text[-_LONGEST:] + data).split(b"\n")
            for line in lines:
                self._take(line)
            if ready and not data and not gone:
                time.sleep(_PAUSE)
            if not gone and not self.late and self.clock.over(self.seconds):
                self.late = self.clock.over(self.seconds)
                os.kill(self.pid, signal.SIGKILL)
        os.close(self.reading)
        for number, handler in before:
            signal.signal(number, handler)
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _take(self, line: bytes) -> None:
        """Notes what the child tells; nothing else may write to the pipe, but a kernel can."""
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(line):
                case ["collected", int() as count]:
                    self.collected += count
                case ["begun", str() as test]:
                    self.begun = test
                case ["report", [str() as test, dict() as report]]:
                    self.reports.setdefault(test, []).append(report)
                case ["reported", str() as test]:
                    self.reported.append(test)
                case ["stopped", _]:
                    self.seconds = 0.0
                case ["finished", _]:
                    self.finished = True

    def _say(self, text: str) -> tuple[str, str]:
        """What the child had printed and nobody shows, after a sentence on stderr."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
        if capture is None:
            return "", ""
        printed = capture.read_global_capture()
        capture.resume_global_capture()
        return printed


def _distributed(config: pytest.Config) -> bool:
    """Whether xdist's workers run the tests: it reports the end of a worker itself."""
    return bool(getattr(config.option, "numprocesses", None) or getattr(config.option, "tx", None))
