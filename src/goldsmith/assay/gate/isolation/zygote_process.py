"""The zygote as its owner sees it: started once in a process, asked to fork and to end what it forked."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import IO, Any

from .own_process import own_process
from .zygote import PACKET

PRELOADED = (
    "torch", "goldsmith.assay.gate.candidate_call", "goldsmith.assay.checks",
    "goldsmith.assay.gate.isolation.child:prepare",
)  # fmt: skip
_GRACE = 5.0  # seconds in which a zygote ends what it forked, after the connection to it has closed
_lock = threading.Lock()
_mine: dict[int, ZygoteProcess] = {}
_above: list[ZygoteProcess] = []  # its zygote's own: the connection keeps that one alive


class NoZygote(RuntimeError):
    """The zygote could not be started, or has ended; the text says why."""


class ZygoteProcess:
    """A connection to a zygote, and the process if this one started it."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None):
        self.control, self.process = control, process
        self.lock = threading.Lock()
        self.isolation: str = self.ask({"do": "facts"})["isolation"]

    @staticmethod
    def start(
        preload: Sequence[str] = PRELOADED,
        *,
        stderr: IO[bytes] | None = None,
        threads: int = 0,
        interpret: bool = False,
    ) -> ZygoteProcess:
        """interpret: Triton's kernels run in its interpreter, even where there is a GPU; threads: of torch."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, environment = own_process(
            f"{__package__}.zygote", str(its.fileno()), *preload, PYTORCH_NVML_BASED_CUDA_CHECK="1"
        )
        if interpret:
            environment["TRITON_INTERPRET"] = "1"
        if threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        process = subprocess.Popen(
            command, pass_fds=[its.fileno()], env=environment, stdin=subprocess.DEVNULL, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        its.close()
        try:
            return ZygoteProcess(ours, process)
        except NoZygote as error:
            ours.close()
            raise NoZygote(f"with status {process.wait()}") from error
        except BaseException:
            process.kill()
            process.wait()
            raise

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self.lock:
            try:
                socket.send_fds(self.control, [json.dumps(request).encode()], list(descriptors))
                answer = self.control.recv(PACKET)
            except OSError as error:
                raise NoZygote(f"the zygote does not answer: {error}") from error
        if not answer:
            raise NoZygote("the zygote has ended")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the zygote and all that it forked."""
        self.control.close()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def zygote() -> ZygoteProcess:
    """This process's zygote, started when it is first needed; it ends with this process."""
    with _lock:
        known = _mine.get(os.getpid())
        if known is None or known.process is not None and known.process.poll() is not None:
            _mine.clear()  # after a fork: the parent's
            known = _mine[os.getpid()] = ZygoteProcess.start()
            atexit.register(_close, os.getpid())
        return known


def join(control: socket.socket) -> None:
    """Makes a connection to somebody else's zygote this process's own."""
    with _lock:
        _mine.clear()
        _mine[os.getpid()] = ZygoteProcess(control)


def fork_own(control: socket.socket) -> ZygoteProcess:
    """This process's zygote, forked from somebody else's: it need not import anything."""
    above = ZygoteProcess(control)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"do": "fork", "main": f"{__package__}.zygote:serve_again", "limits": None, "sandbox": None}
    answer = above.ask({**request, "grace": _GRACE}, [its.fileno(), 2])
    its.close()
    if "problem" in answer:
        raise NoZygote(answer["problem"])
    _above[:] = [above]
    join(ours)
    return zygote()


def _close(pid: int) -> None:
    known = _mine.pop(pid, None)
    if known is not None and pid == os.getpid():
        known.close()
