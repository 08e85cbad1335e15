"""The child process that runs candidates: `python -m goldsmith.cli.verify.worker [--interpret auto|on]`.

It reads one request a line from stdin and answers each with one line of JSON. A kernel that crashes takes this process
down and nothing else; the parent reports the signal as evidence. What a candidate prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from typing import IO, Any

from .pool import NOT_THEIRS

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def main() -> None:
    _die_with_parent()
    requests, replies = _private_pipes()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a parent in the background ignores it, its child need not
    faulthandler.enable()  # a fatal signal then leaves the Python frames that led to it on stderr
    _choose_interpreter("on" if "--interpret" in sys.argv else "auto")
    from . import work

    _ends_when_asked()
    session = work.Session(lambda progress: _send(replies, {"progress": progress}))
    _send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        try:
            reply = session.answer(request)
        except (KeyboardInterrupt, SystemExit) as error:  # a Ctrl-C of the user's goes to the parent, never to a worker
            reply = {"ended": f"{type(error).__name__} {error}".strip(), "where": _where(error)}
        except Exception as error:  # noqa: BLE001  whatever breaks in the assay must reach the parent, not end the run
            reply = {"broken": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        _send(replies, {"id": request["id"], **reply})


def _ends_when_asked() -> None:
    """A signal of the parent's ends the run that takes too long: Python raises in it, and its stack goes to stderr."""
    if not hasattr(signal, "SIGUSR1"):
        return
    from ...assay.execute import hooks

    def raised(number: int, frame: Any) -> None:
        if hooks.RUNNING:  # else it has ended in the meantime
            raise hooks.TakesTooLong(_stands(frame))

    signal.signal(signal.SIGUSR1, raised)
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)  # also where no Python code runs


def _stands(frame: Any) -> str:
    """The innermost frame that is neither a library's nor ours."""
    for seen in reversed(traceback.extract_stack(frame)):
        if not any(part in seen.filename for part in NOT_THEIRS):
            return f"in {seen.name} ({seen.filename}, line {seen.lineno})"
    return ""


def _where(error: BaseException) -> str:
    """The innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"in {frames[-1].name} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _die_with_parent() -> None:
    """A candidate that hangs must not outlive a parent that was killed (Linux; elsewhere the closed pipe has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _private_pipes() -> tuple[IO[str], IO[str]]:
    """The parent's pipes, moved out of reach of candidates that print or read."""
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _choose_interpreter(mode: str) -> None:
    """Triton reads TRITON_INTERPRET when a kernel is defined, so it is set before any of them is imported."""
    if mode == "auto":
        import torch

        if torch.cuda.is_available():
            return
    os.environ["TRITON_INTERPRET"] = "1"


def _send(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
