"""Child processes of tests that begin with torch already imported: each saves 2.5 s of processor time.

A server, itself a fresh Python, imports torch and nothing else, and forks a child for each command. The child gets the
command's arguments, folder, environment, pipes and process group. It is a real child of the test's process: its pid,
its signals and its exit status are its own. What children share is torch's import and the seed of Python's hashes; so
tests of imports, of what torch reads at import, or of two processes that agree bit for bit start Python itself.
"""

import array
import builtins
import contextlib
import ctypes
import inspect
import io
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types

SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER
SIZE = 100_000  # bytes that a request may have: half of a socket's buffer
# What a library reads when it is loaded, and Python when it starts: a command with other values gets its own Python.
READ_AT_START = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "TORCH", "PYTORCH", "ATEN_", "MALLOC_", "CUDA", "NVIDIA_",
    "PYTHON", "LC_", "LANG",
)  # fmt: skip
USUAL = subprocess.Popen
PYTHON = sys.executable
CLIENT = os.path.join(os.path.dirname(__file__), "warm_client.py")
EXECUTE = inspect.signature(USUAL._execute_child)


def at_start(environment):
    """The part of an environment that counts before the first line of a program."""
    return {n: v for n, v in environment.items() if n.startswith(READ_AT_START) and n != "PYTHONPATH"}


# the test's side


class Server:
    """The process that forks; started at the first command, and ended with its socket."""

    def __init__(self):
        self.environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "TRITON_INTERPRET")}
        self.socket = self.process = None
        self.lock = threading.Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")  # short, as the path of a socket must be
        self.place = os.path.join(self.folder.name, "socket")
        self.works = sys.platform == "linux"

    def start(self, request, files):
        """The pid of a new child of this process; None if there can be none."""
        message = json.dumps(request).encode()
        if at_start(request["environment"]) != at_start(self.environment) or len(message) > SIZE or not self._runs():
            return None
        prctl = ctypes.CDLL(None).prctl
        with self.lock:
            prctl(SUBREAPER, 1, 0, 0, 0)  # a forked process whose parent has ended becomes a child of this one
            try:
                fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
                self.socket.sendmsg([message], fds)
                return int(self.socket.recv(100))
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)

    def commands(self):
        """A folder for a shell's PATH: its `python` and `goldsmith` start from the server, too."""
        if self._runs():
            for name, first in (("python", []), ("goldsmith", [os.path.join(os.path.dirname(PYTHON), "goldsmith")])):
                words = [PYTHON, "-IS", CLIENT, self.place, PYTHON, *first]
                path = os.path.join(self.folder.name, name)
                with open(path, "w") as text:
                    text.write(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
                os.chmod(path, 0o700)
        return self.folder.name

    def _runs(self):
        """Starts the server if it has not been, and says whether it can fork."""
        with self.lock:
            if self.works and self.process is None:
                self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                code = f"import sys; sys.path.append({os.path.dirname(__file__)!r}); import warm_start; "
                code += f"sys.path.pop(); warm_start.serve({theirs.fileno()}, {self.place!r})"
                self.process = USUAL(
                    [PYTHON, "-c", code], env=self.environment, cwd="/", pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip
                theirs.close()
                self.works = self.socket.recv(100) == b"ready"
        return self.works

    def close(self):
        if self.process is not None:
            self.socket.close()
            self.process.wait()
        self.folder.cleanup()


def popen(server):
    """A subprocess.Popen whose Python processes start from the server, where that makes no difference."""

    class Popen(USUAL):
        def _execute_child(self, *arguments):
            named = EXECUTE.bind(self, *arguments).arguments
            request = _request(named)
            files = [named["p2cread"], named["c2pwrite"], named["errwrite"]]
            files = [number if file < 0 else file for number, file in enumerate(files)]
            pid = server.start(request, files) if request else None
            if pid is None:
                super()._execute_child(*arguments)
                return
            self.pid, self._child_created = pid, True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(named[n] for n in pipes))

    return Popen


def _request(named):
    """What the server has to know, or None if this command needs a Python of its own."""
    args, cwd = named["args"], os.getcwd() if named["cwd"] is None else os.fspath(named["cwd"])
    if isinstance(args, (str, bytes, os.PathLike)) or any(named[n] for n in ("shell", "preexec_fn", "pass_fds")):
        return None
    args = [os.fspath(a) for a in args]
    if args[0] != PYTHON or named["executable"] not in (None, args[0]) or len(args) < 2:
        return None
    if not (
        args[1] in ("-m", "-c") and len(args) > 2 or args[1][0] != "-" and os.path.isfile(os.path.join(cwd, args[1]))
    ):
        return None
    if any(named.get(n, -1) not in (None, -1) for n in ("gid", "gids", "uid", "umask", "process_group")):
        return None
    if not os.path.isdir(cwd):
        return None
    environment = dict(os.environ if named["env"] is None else named["env"])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if any(os.path.exists(os.path.join(p, f"{n}customize.py")) for p in paths if p for n in ("site", "user")):
        return None
    return {
        "args": args, "cwd": cwd, "environment": environment,
        "session": bool(named["start_new_session"]),
    }  # fmt: skip


# the server's side


def serve(number, place):
    """Forks a child for each request, which becomes the command, until the socket's other end is closed."""
    import torch  # noqa: F401 - what this process is for

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the commands
    connection = socket.socket(fileno=number)
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)  # torch's import started threads, which a child would lack
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(place)
    listening.listen()
    environment = at_start(os.environ)
    connection.send(b"ready")
    while True:
        ready, _, _ = select.select([connection, listening], [], [])
        if listening in ready:
            caller, _ = listening.accept()
            if not os.fork():
                listening.close()
                connection.close()
                _serve_shell(caller, environment)
            caller.close()
        if connection in ready:
            request, files = _received(connection)
            if request is None:
                os._exit(0)
            child = _forked((connection, listening), request, files)
            for file in files:
                os.close(file)
            connection.send(str(child).encode())
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _received(connection):
    message, ancillary, *_ = connection.recvmsg(SIZE, socket.CMSG_SPACE(3 * 4))
    return (json.loads(message), array.array("i", ancillary[0][2])) if message else (None, None)


def _serve_shell(caller, environment):
    """In a process of its own: runs the command of a shell, and answers with its exit status."""
    request, files = _received(caller)
    if at_start(request["environment"]) != environment:
        caller.send(b"no")
        os._exit(0)
    child = os.fork()
    if not child:
        caller.close()
        _become(request, files)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    caller.send(str(status).encode())
    os._exit(0)


def _forked(connections, request, files):
    """The pid of a child whose parent has ended. In the child itself this ends with the command."""
    reading, writing = os.pipe()
    middle = os.fork()
    if not middle:
        middle = os.getpid()
        child = os.fork()
        if child:
            os.write(writing, str(child).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        for connection in connections:
            connection.close()
        while os.getppid() == middle:
            time.sleep(0.0002)
        _become(request, files)
    os.close(writing)
    os.waitpid(middle, 0)
    child = int(os.read(reading, 100))
    os.close(reading)
    return child


def _become(request, files):
    """Runs the command as Python would have, and ends the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.stdin, sys.stdout, sys.stderr = _stream(0, sys.stdin), _stream(1, sys.stdout), _stream(2, sys.stderr)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.excepthook = _without_these_frames
    sys.modules.pop(__name__)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    _, first, *rest = sys.orig_argv[:] = request["args"]
    paths = [p for p in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if p]
    own = {"-m": os.getcwd(), "-c": ""}.get(first, os.path.dirname(os.path.realpath(first)))
    sys.path[:] = [own, *paths, *sys.path[1:]]
    if first == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [first, *rest]
        main.__file__ = first
        with io.open_code(first) as text:
            exec(compile(text.read(), first, "exec"), main.__dict__)
    sys.exit()


def _without_these_frames(kind, error, trace):
    first = trace
    while trace and trace.tb_frame.f_code is not _become.__code__:
        trace = trace.tb_next
    trace = trace.tb_next if trace else first
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _stream(number, like):
    """A text stream as Python opens it at its start."""
    binary = open(number, "rb" if number == 0 else "wb", closefd=False)
    by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(binary, like.encoding, like.errors, None, by_line, like.write_through)
