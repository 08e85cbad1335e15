"""The zygote: imports modules and calls functions once, and forks when asked to.

    python -m goldsmith.assay.gate.isolation.zygote FD MODULE[:FUNCTION]...

It starts no thread and creates no CUDA context, so that its forks are sound. A request comes with the file descriptors
of the new process: its end of a private socket, and what it prints to. Each request is one JSON packet:

    {"do": "fork", "main": "module:function", "limits", "sandbox", "joins", "grace", "before", "spare"}
                                  answered with {"pid", "home"};
                                  before: a function that the zygote calls once, before the first fork that names it;
                                  joins: the new process gets a connection to the zygote as well, and what it asks for
                                  ends with it; grace: seconds in which it may end by itself;
                                  spare: its main function sets the limits, when its candidate is there
    {"do": "end", "pid"}          kills the process's group and all that it left; answered with {"status"}
    {"do": "facts"}               answered with {"isolation"}
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from . import sandbox as sandboxes
from .limits import Limits, apply
from .sandbox import Sandbox, close_all_but

_SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER: orphans of candidates become children of this process
_MOST_DESCRIPTORS = 4
PACKET = 1 << 16


class ForkedProcess(NamedTuple):
    """A process that the zygote forked.

    asker    who asked for it
    home     its folder, or ""
    joined   the zygote's end of the connection that it got, or None
    grace    seconds in which it may end by itself
    """

    asker: socket.socket
    home: str
    joined: socket.socket | None
    grace: float


class Zygote:
    """Forks candidates and judges, and ends them."""

    def __init__(self, control: socket.socket):
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.first = control
        self.children: dict[int, ForkedProcess] = {}
        self.ended: dict[int, int] = {}
        self.threads = 0  # of torch in its forks
        self.called: set[object] = set()  # functions that some fork wanted to be called before it
        self.isolation = sandboxes.available()

    def serve(self) -> None:
        """Answers requests until the first connection closes."""
        while True:
            for key, _ in self.selector.select():
                if not isinstance(key.fileobj, socket.socket):
                    continue
                if not self._request(key.fileobj) and key.fileobj is self.first:
                    self._end_all(None)
                    return

    def _request(self, control: socket.socket) -> bool:
        """Reads and answers one request; False if the connection has closed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(control, PACKET, _MOST_DESCRIPTORS)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._leave(control)
            return False
        answer = self._answer(control, json.loads(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the asker has just ended; its connection says so next
            control.send(json.dumps(answer).encode())
        return True

    def _answer(self, control: socket.socket, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        if request["do"] == "fork":
            return self._fork(control, request, descriptors)
        if request["do"] == "end":
            return {"status": self._end(request["pid"], request.get("grace", 0.0))}
        return {"isolation": self.isolation}

    def _fork(self, control: socket.socket, request: dict[str, object], descriptors: list[int]) -> dict[str, object]:
        before = request.get("before")
        if isinstance(before, str) and before and before not in self.called:
            self.called.add(before)
            _function(before)()
        home = tempfile.mkdtemp(prefix=f"home-{os.getpid()}-") if request["sandbox"] is not None else ""
        joined, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if request.get("joins") else (None, None)
        if its is not None:
            descriptors = [*descriptors, its.fileno()]
        try:
            pid = os.fork()
        except OSError as error:
            if home:
                shutil.rmtree(home, ignore_errors=True)
            return {"problem": f"fork: {error.strerror}"}
        if pid == 0:
            code = 70
            try:
                code = _child(request, descriptors, home, full=self.isolation == sandboxes.FULL, threads=self.threads)
            except BaseException:  # noqa: BLE001 - a fork must never return into the zygote's loop
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        if joined is not None and its is not None:
            its.close()
            self.selector.register(joined, selectors.EVENT_READ)
        self.children[pid] = ForkedProcess(
            control, home, joined, grace if isinstance(grace := request.get("grace"), float) else 0.0
        )
        return {"pid": pid, "home": home}

    def _end(self, pid: int, grace: float = 0.0) -> int | None:
        """Kills a process and what it left; returns its wait status. None: not a child of this zygote.

        grace: seconds in which it may end by itself, so that its status is its own.
        """
        if pid not in self.children:
            return None
        child = self.children.pop(pid)
        ended, status = os.waitpid(pid, os.WNOHANG)
        until = time.monotonic() + max(grace, child.grace)
        while not ended and time.monotonic() < until:
            time.sleep(0.002)
            ended, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
            _, status = os.waitpid(pid, 0)
        if child.joined is not None:
            self._leave(child.joined)
        self._sweep()
        if child.home:
            shutil.rmtree(child.home, ignore_errors=True)
        return status

    def _leave(self, control: socket.socket) -> None:
        """Ends what a connection asked for, and closes it."""
        self._end_all(control)
        if control.fileno() >= 0:
            self.selector.unregister(control)
            control.close()

    def _sweep(self) -> None:
        """Kills orphans: children of this process that it did not fork, and theirs."""
        while True:
            try:
                with open(f"/proc/self/task/{os.getpid()}/children") as file:
                    orphans = [int(p) for p in file.read().split() if int(p) not in self.children]
            except OSError:
                return
            if not orphans:
                return
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def _end_all(self, control: socket.socket | None) -> None:
        """Ends the processes that a connection asked for, or all."""
        for pid, child in list(self.children.items()):
            if control is None or child.asker is control:
                self._end(pid)


def _child(request: dict[str, Any], descriptors: list[int], home: str, *, full: bool, threads: int) -> int:
    """The new process: leaves the zygote's files and session, enters its sandbox, and runs its main function."""
    os.setsid()
    private, output, *control = descriptors
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    close_all_but((0, 1, 2, private, *control))
    request["control"] = control[0] if control else -1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    box = request["sandbox"]
    if box is None and "folder" in request:
        os.chdir(request["folder"])
    if box is not None:
        shown, memory = tuple(request.get("paths", ())), request["limits"]["memory_bytes"]
        sandboxes.enter(Sandbox(home, tuple(box["hidden"]), full and box["full"], memory, shown))
        os.chdir(home)
        environment = {n: os.environ[n] for n in box["environment"] if n in os.environ}
        os.environ.clear()
        # Triton read HOME when the zygote imported it, but reads TRITON_HOME whenever it needs its folder
        os.environ.update(environment, HOME=home, TMPDIR=home, XDG_CACHE_HOME=home, PWD=home, TRITON_HOME=home)
        tempfile.tempdir = home  # otherwise its first use writes a file to find out, which would be evidence
    if request["limits"] is not None and not request.get("spare"):
        apply(Limits(**request["limits"]), address_space=request["address_space"], boxed=box is not None)
    if threads:
        sys.modules["torch"].set_num_threads(threads)
    gc.enable()
    return int(_function(request["main"])(socket.socket(fileno=private), request) or 0)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def serve_again(control: socket.socket, request: object) -> int:
    """A zygote that another one forked, with all that was imported there, for a process of its own."""
    zygote = _new(control)
    torch = sys.modules["torch"]
    zygote.threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    gc.freeze()
    zygote.serve()
    return 0


def _new(control: socket.socket) -> Zygote:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session that asked ends its children
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    return Zygote(control)


def main() -> None:
    gc.disable()  # while it imports, the collector takes a quarter of the time to find 1 MB
    zygote = _new(socket.socket(fileno=int(sys.argv[1])))
    for entry in sys.argv[2:]:
        name, _, function = entry.partition(":")
        module = importlib.import_module(name)
        if name == "torch":
            zygote.threads = module.get_num_threads()
            module.set_num_threads(1)  # a fork that uses a pool of threads which its parent has used waits for ever
        if function:
            getattr(module, function)()
        if name == "torch" and not module.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # before any kernel, because Triton reads it when one is defined
    gc.freeze()
    zygote.serve()


if __name__ == "__main__":
    main()
