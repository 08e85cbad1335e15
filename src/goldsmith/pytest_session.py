"""A pytest session in a child process, which fails unless every test has reported.

A kernel that calls `os._exit(0)`, or C's `exit`, ends the process that runs the tests, and its status would be a
success. The parent waits, counts, and says during which test the session ended. It forks before tests are collected,
and only where pytest is the program itself: not inside another program, an xdist worker or a coverage run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from types import FrameType

import pytest

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_FAILED = 1  # pytest's status where tests failed


def run_in_child(config: pytest.Config) -> int | None:
    """Forks. The child gets None, and runs the session. The parent gets the status of the session when it has ended."""
    if not _possible(config):
        return None
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with contextlib.suppress(OSError, AttributeError):  # systems without prctl
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        config.pluginmanager.register(_Child(writing), "goldsmith-session")
        return None
    os.close(writing)
    return _watch(config, pid, reading)


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
    """Tells the parent what was collected, what began, what has reported, and that the session is over."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def _tell(self, word: str, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self.pipe, f"{word} {text}\n".encode(errors="replace"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell("collected", str(len(session.items)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("begun", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell("reported", nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._tell("finished", str(int(exitstatus)))


def _watch(config: pytest.Config, pid: int, reading: int) -> int:
    """Waits for the session; its own status, or a failure where it ended early."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    before = [(n, signal.signal(n, pass_on)) for n in (signal.SIGTERM, signal.SIGHUP)]
    before.append((signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN)))  # a terminal sends it to both
    with os.fdopen(reading, errors="replace") as lines:
        told = [line.rstrip("\n").partition(" ")[::2] for line in lines]
    _, status = os.waitpid(pid, 0)
    for number, handler in before:
        signal.signal(number, handler)
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    collected = sum(int(text) for word, text in told if word == "collected")
    begun = [text for word, text in told if word == "begun"]
    reported = [text for word, text in told if word == "reported"]
    finished = any(word == "finished" for word, _ in told)
    if finished and (code != 0 or len(reported) >= collected or _distributed(config)):
        return code
    if not finished and not collected and code != 0:
        return code  # pytest itself has said why
    during = f" during {begun[-1]}" if begun and begun[-1] not in reported[-1:] else ""
    _say(
        config,
        f"goldsmith: the process of this session ended with status {code}{during}, when {len(reported)} of "
        f"{collected} tests had reported. The session has failed.",
    )
    return code or _FAILED


def _distributed(config: pytest.Config) -> bool:
    """Whether xdist's workers run the tests: it reports the end of a worker itself."""
    return bool(getattr(config.option, "numprocesses", None) or getattr(config.option, "tx", None))


def _say(config: pytest.Config, text: str) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
