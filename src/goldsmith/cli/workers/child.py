"""The worker process of a command, forked from its zygote: it judges, and holds no candidate of the user's own.

It answers each request with one reply. A kernel of goldsmith's own that crashes ends only this process; a candidate of
the user's own runs in a further process, which this one asks the zygote for. What either prints goes to a file.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from ...assay.declare import problem_steps
from ...assay.execute import hooks
from ...assay.gate.isolation import candidate_process, zygote_process
from ...assay.gate.isolation.candidate_process import CandidateEnded
from ...assay.gate.isolation.protocol import Closed, Connection
from ...assay.support.deadline import WRITE_STACK
from ..verify.worker_tasks import VerifyTasks
from .messages import ProgressMessage, WorkerReply, WorkerRequest
from .pool import LIBRARY_PATHS


def serve(private: socket.socket, request: Mapping[str, Any]) -> int:
    """Answers the command's requests until it closes the connection."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()  # on a fatal signal, writes the Python frames to stderr
    zygote_process.join(socket.socket(fileno=request["control"]))
    connection = Connection(private, bytes.fromhex(request["nonce"]))
    _end_runs_on_signal()
    tasks = VerifyTasks()
    connection.send(0, {"ready": True})
    while True:
        try:
            number, message, _ = connection.receive()
        except Closed:
            break
        reply: WorkerReply
        own = message["do"] != "check" or ":" in message["source"]  # not of an operator of goldsmith's
        problem_steps.LISTENERS[:] = [partial(_tell_step, connection, number)] if own else []
        try:
            reply = _answer(tasks, message, partial(_tell, connection, number))
        except CandidateEnded as ended:
            reply = _candidate_ended(ended)
        except (
            KeyboardInterrupt,
            SystemExit,
        ) as error:  # raised by the candidate: the user's own Ctrl-C reaches only the parent
            reply = {"ended": f"{type(error).__name__} {error}".strip(), "where": _innermost_frame(error)}
        except Exception as error:  # noqa: BLE001  any failure of the assay must reach the parent, and must not end the run
            reply = {"broken": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        connection.send(number, reply)
    tasks.close()
    return 0


def _answer(tasks: VerifyTasks, request: WorkerRequest, tell: Callable[[ProgressMessage], None]) -> WorkerReply:
    if request["do"] == "diagnose" or request["do"] == "replay":
        from ..diagnose import worker_tasks  # imported here because the workers of verify do not need it

        task = worker_tasks.diagnose if request["do"] == "diagnose" else worker_tasks.replay
        return {**task(request, tell)}
    return {**tasks.answer(request)}


def _candidate_ended(ended: CandidateEnded) -> WorkerReply:
    """The reply after the end of a candidate's process: as if that had been this one."""
    if ended.raised:
        return {"ended": ended.raised, "where": ended.where}
    return {
        "died": {
            "how": ended.how or f"because {ended.text}",
            "stderr": ended.stderr if ended.how else "",
            "signal": ended.signal,
            "ended": "" if ended.how else ended.status,
        }
    }


def _end_runs_on_signal() -> None:
    """Let WRITE_STACK from the parent end an overdue run: it raises TakesTooLong, and the stack goes to stderr."""

    def raised(number: int, frame: FrameType | None) -> None:
        if hooks.RUNNING:  # otherwise the run has just ended
            raise hooks.TakesTooLong(candidate_process.waiting_at() or _user_frame(frame))

    signal.signal(WRITE_STACK, raised)
    faulthandler.register(WRITE_STACK, all_threads=False, chain=True)  # writes the stack even if no Python code runs


def _user_frame(frame: FrameType | None) -> str:
    """The innermost frame of the user's own code, in words."""
    for entry in reversed(traceback.extract_stack(frame)):
        if not any(part in entry.filename for part in LIBRARY_PATHS):
            return f"in {entry.name} ({entry.filename}, line {entry.lineno})"
    return ""


def _innermost_frame(error: BaseException) -> str:
    """The innermost frame of an exception, in words; of a candidate's in its own process."""
    where = getattr(error, "where", "")
    if where:
        return str(where)
    frames = traceback.extract_tb(error.__traceback__)
    return f"in {frames[-1].name} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _tell(connection: Connection, number: int, progress: ProgressMessage) -> None:
    connection.send(number, {"progress": progress})


def _tell_step(connection: Connection, number: int, words: str) -> None:
    connection.send(number, {"step": words})
