"""The worker process that runs candidates: `python -m goldsmith.cli.workers.child [--interpret]`.

It reads one JSON request a line from stdin and answers each with one line of JSON. A kernel that crashes ends only this
process; the parent reports the signal as evidence. What a candidate prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import IO, TYPE_CHECKING

from .pool import LIBRARY_PATHS

if TYPE_CHECKING:
    from ..verify.worker_tasks import VerifyTasks
    from .messages import ProgressMessage, WorkerReply, WorkerRequest

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def main() -> None:
    _die_with_parent()
    requests, replies = _private_pipes()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a parent in the background ignores SIGINT; its worker must not
    faulthandler.enable()  # on a fatal signal, writes the Python frames to stderr
    _choose_interpreter("on" if "--interpret" in sys.argv else "auto")
    from ..verify.worker_tasks import VerifyTasks

    _end_runs_on_signal()
    tasks = VerifyTasks()
    _send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        reply: WorkerReply
        try:
            reply = _answer(tasks, request, lambda progress: _send(replies, {"progress": progress}))
        except (
            KeyboardInterrupt,
            SystemExit,
        ) as error:  # raised by the candidate: the user's own Ctrl-C reaches only the parent
            reply = {"ended": f"{type(error).__name__} {error}".strip(), "where": _innermost_frame(error)}
        except Exception as error:  # noqa: BLE001  any failure of the assay must reach the parent, and must not end the run
            reply = {"broken": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        _send(replies, {"id": request["id"], **reply})
    tasks.close()


def _answer(tasks: VerifyTasks, request: WorkerRequest, tell: Callable[[ProgressMessage], None]) -> WorkerReply:
    if request["do"] == "diagnose" or request["do"] == "replay":
        from ..diagnose import worker_tasks  # imported here because the workers of verify do not need it

        task = worker_tasks.diagnose if request["do"] == "diagnose" else worker_tasks.replay
        return {**task(request, tell)}
    return {**tasks.answer(request)}


def _end_runs_on_signal() -> None:
    """Let SIGUSR1 from the parent end an overdue run: it raises TakesTooLong there, and the stack goes to stderr."""
    if not hasattr(signal, "SIGUSR1"):
        return
    from ...assay.execute import hooks

    def raised(number: int, frame: FrameType | None) -> None:
        if hooks.RUNNING:  # otherwise the run has just ended
            raise hooks.TakesTooLong(_user_frame(frame))

    signal.signal(signal.SIGUSR1, raised)
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)  # writes the stack even if no Python code runs


def _user_frame(frame: FrameType | None) -> str:
    """The innermost frame of the user's own code, in words."""
    for entry in reversed(traceback.extract_stack(frame)):
        if not any(part in entry.filename for part in LIBRARY_PATHS):
            return f"in {entry.name} ({entry.filename}, line {entry.lineno})"
    return ""


def _innermost_frame(error: BaseException) -> str:
    """The innermost frame of an exception, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"in {frames[-1].name} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _die_with_parent() -> None:
    """On Linux, ask the kernel to kill this process when its parent dies; elsewhere the closed pipe ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _private_pipes() -> tuple[IO[str], IO[str]]:
    """The pipes to the parent, moved away from stdin and stdout, which candidates may use."""
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _choose_interpreter(mode: str) -> None:
    """Set TRITON_INTERPRET before any kernel is imported, because Triton reads it when a kernel is defined."""
    if mode == "auto":
        import torch

        if torch.cuda.is_available():
            return
    os.environ["TRITON_INTERPRET"] = "1"


def _send(replies: IO[str], message: Mapping[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
