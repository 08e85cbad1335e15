"""The zygote as its owner sees it: started once in a process, asked to fork and to end what it forked.

A spare is a candidate's process that is forked before its candidate is there. It creates the CUDA context and loads
torch's kernels while another candidate is judged, and takes the next one if its request is the same.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from .own_process import own_process
from .protocol import NONCE_BYTES, Closed, Connection, Malformed
from .zygote import PACKET

PRELOADED = (
    "torch", "goldsmith.assay.gate.candidate_call", "goldsmith.assay.checks",
    "goldsmith.assay.gate.isolation.child:prepare",
)  # fmt: skip
_GRACE = 5.0  # seconds in which a zygote ends what it forked, after the connection to it has closed
_PATIENCE = 60.0  # seconds for a spare to warm up and to answer: contexts on one GPU are made one after the other
_lock = threading.Lock()
_mine: dict[int, ZygoteProcess] = {}
_above: list[ZygoteProcess] = []  # its zygote's own: the connection keeps that one alive


class NoZygote(RuntimeError):
    """The zygote could not be started, or has ended; the text says why."""


@dataclass
class NewProcess:
    """A process that waits for a candidate. request: the settings that it was forked with; reading: what it prints."""

    request: Mapping[str, object]
    pid: int
    home: str
    connection: Connection
    reading: int

    def answers(self) -> bool:
        """Whether a spare has warmed up and nobody has stopped it or written to its home, as an earlier candidate may.

        From then on it waits for its candidate, whose limits it has set.
        """
        try:
            self.connection.send(0, "begin")
            self.connection.receive(time.monotonic() + _PATIENCE)
            return not self.connection.pending() and not (self.home and os.listdir(self.home))
        except (Closed, Malformed, TimeoutError, OSError):
            return False

    def close(self) -> None:
        os.close(self.reading)
        self.connection.socket.close()


class ZygoteProcess:
    """A connection to a zygote, and the process if this one started it. spares: whether it makes any."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None):
        self.control, self.process = control, process
        self.lock = threading.Lock()
        self.spares = False
        self.spare: NewProcess | None = None
        self.before: object = ""  # what the last candidate wanted to be called before its fork
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

    def new_process(self, request: Mapping[str, object], *, ahead: bool) -> NewProcess:
        """The spare, if it was made for this request, or a new fork. ahead: the next spare is made."""
        self.before = request["before"] or self.before  # the zygote calls it once, and its later forks all have it
        request = {**request, "before": self.before}
        process, ahead = None, ahead and self.spares
        if self.spare is not None and (ahead or self.spare.request == request):
            spare, self.spare = self.spare, None
            try:
                process = spare if spare.request == request and spare.answers() else None
            finally:
                if process is None:
                    self._end(spare)
        process = process or self._fork(request)
        if ahead:
            with contextlib.suppress(NoZygote):  # the next candidate finds out why
                self.spare = self._fork(request, spare=True)
        return process

    def _fork(self, request: Mapping[str, object], *, spare: bool = False) -> NewProcess:
        nonce = secrets.token_bytes(NONCE_BYTES)
        ours, its = socket.socketpair()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        process = NewProcess(request, 0, "", Connection(ours, nonce), reading)
        try:
            answer = self.ask({**request, "nonce": nonce.hex(), "spare": spare}, [its.fileno(), writing])
            if "problem" in answer:
                raise NoZygote(answer["problem"])
        except BaseException:
            process.close()
            raise
        finally:
            its.close()
            os.close(writing)
        process.pid, process.home = answer["pid"], answer["home"]
        return process

    def _end(self, spare: NewProcess) -> None:
        with contextlib.suppress(NoZygote):
            self.ask({"do": "end", "pid": spare.pid})
        spare.close()

    def end_spare(self) -> None:
        if self.spare is not None:
            spare, self.spare = self.spare, None
            self._end(spare)

    def close(self) -> None:
        """Ends the zygote and all that it forked."""
        self.control.close()
        if self.spare is not None:
            self.spare.close()
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
