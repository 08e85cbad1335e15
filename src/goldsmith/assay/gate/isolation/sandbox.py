"""Namespaces of a candidate's process, where the system lets an ordinary user make them.

Inside: no network; no process but its own, all of which end with the first; a new root, which holds the system's and
Python's folders, read-only, and an empty temporary folder; named folders look empty. So sockets and files of the user
are not there. Afterwards the process drops the rights that the namespaces gave it, so that it cannot undo any of this.
A kernel exploit can; this module does not claim otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
_DETACH = 2
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD, _ATTR_RDONLY = 442, 0x8000, -100, 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # number of the system call, which the C library does not offer
_CAPABILITY_VERSION = 0x20080522
_PACKAGES = ("site-packages", "dist-packages")  # how folders of packages end
_MANY = 8  # folders beside each other, of which the one above is shown: each folder costs every candidate a mount
_NESTED = 3  # folders of a package without files, such as nvidia/cuda
_FILES = 1 << 16  # that the temporary folders may hold together
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu", "/sys",
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom",
)  # fmt: skip
_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH")  # variables with folders
FULL, GROUP = "namespaces", "process group"  # how much isolation there is


PASSED_ON = (  # variables that a kernel's compiler or libraries need
    "PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK", "CC", "CXX",
)  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """Where a candidate's process runs.

    boxed    in namespaces, with a home of its own and a reduced environment
    hidden   folders that it may not see
    gpu      that it uses, or "". Its driver allows neither namespaces nor a limit of the address space
    threads  of torch; 0: as many as the zygote has
    paths    folders to import from
    triton   whether it is likely to compile Triton kernels, so that the zygote makes ready what all of them need
    """

    boxed: bool = True
    hidden: tuple[str, ...] = ()
    gpu: str = ""
    threads: int = 0
    paths: tuple[str, ...] = ()
    triton: bool = False


@dataclass(frozen=True)
class Sandbox:
    """home: a folder that can be written, empty at first, as are /tmp and /dev/shm; hidden: folders that look empty.

    memory_bytes: that these three folders may hold together; shown: further folders that can be read.
    """

    home: str
    hidden: tuple[str, ...] = ()
    full: bool = True
    memory_bytes: int = 1 << 30
    shown: tuple[str, ...] = ()


class Refused(OSError):
    """The system does not let this user make namespaces; the text says which call failed."""


def enter(sandbox: Sandbox) -> None:
    """Goes on in a new process inside of the namespaces; this process waits for its end, and ends in the same way."""
    _die_with_parent()
    if not sandbox.full:
        return
    user, group = os.getuid(), os.getgid()
    _unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    for _ in range(2):  # the first is process 1, which ignores its own fatal signals and adopts orphans
        _continue_in_child()
    _file_systems(sandbox)
    _drop_rights()


def available() -> str:
    """FULL, or why this system only has process groups; tried in a child."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    linked_folders(tuple(sys.path))  # once, for all processes that are forked
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = FULL
        try:
            enter(Sandbox(tempfile.gettempdir()))
        except Exception as error:  # noqa: BLE001 - whatever the reason, there are no namespaces
            text = str(error) or type(error).__name__
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as answer:
        return answer.read() or "the process that tried namespaces ended"


def _continue_in_child() -> None:
    """Forks. The child returns; the parent waits for it, then ends with its status."""
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        return
    status = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.wait()
            if ended == pid:
                break
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if os.getpid() == 1:  # it cannot die by its own signal; its parent understands this status
            os._exit(128 + number)
        _die_by(number)
    code = os.WEXITSTATUS(status)
    if os.getpid() != 1 and code > 128:
        _die_by(code - 128)
    os._exit(code)


def _die_by(number: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _file_systems(sandbox: Sandbox) -> None:
    """A new root on a file system in memory, whose size limits what the temporary folders hold."""
    _mount("none", "/", None, _REC | _PRIVATE)
    root = sandbox.home
    data = f"size={sandbox.memory_bytes},nr_inodes={_FILES},mode=755"
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, data)
    written = dict.fromkeys(("/tmp", "/dev/shm", sandbox.home))
    for path, shown in _view(sandbox.shown, sandbox.hidden):
        place, source = f"{root}{path}", os.path.realpath(path)
        os.makedirs(place if os.path.isdir(source) or not shown else os.path.dirname(place), exist_ok=True)
        if shown and not os.path.isdir(source):
            Path(place).touch()
        _mount(source if shown else "tmpfs", place, None if shown else "tmpfs", _BIND | _REC if shown else _NOSUID)
    for name in ("/proc", *written):
        os.makedirs(f"{root}{name}", exist_ok=True)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    _attributes(root, _ATTR_RDONLY, 0)
    for name in written:
        _mount(f"{root}{name}", f"{root}{name}", None, _BIND)
        _attributes(f"{root}{name}", 0, _ATTR_RDONLY)
    os.chdir(root)
    number = _PIVOT_ROOT.get(os.uname().machine, -1)
    if _libc().syscall(number, b".", b".") != 0 or _libc().umount2(b".", _DETACH) != 0:
        raise Refused(f"pivot_root: {os.strerror(ctypes.get_errno())}")
    os.chdir("/")


def _view(further: Sequence[str], hidden: Sequence[str]) -> list[tuple[str, bool]]:
    """(path, whether it is shown or empty) of what the new root holds, outer ones first."""
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix, *(p for p in sys.path if p != os.getcwd()))
    linked = linked_folders(tuple(p for p in sys.path if p != os.getcwd()))
    named = [p for name in _PATHS for p in os.environ.get(name, "").split(os.pathsep)]
    paths = [
        os.path.abspath(p)
        for p in (*_SYSTEM, *python, *linked, *named, *further)
        if os.path.isabs(p) and os.path.exists(p)
    ]
    shown = {**{p: True for path in paths for p in (path, os.path.realpath(path)) if p != "/"}}
    shown.update({path: False for path in hidden if path != "/"})
    view: list[tuple[str, bool]] = []
    for path in sorted(shown, key=lambda p: p.count("/")):
        above = [kind for outer, kind in view if Path(path).is_relative_to(outer)]
        if shown[path] != (above[-1] if above else None):  # a hidden folder is there, so that a look into it is seen
            view.append((path, shown[path]))
    return view


@functools.cache
def linked_folders(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Where packages lie whose files are links out of the environment, as those of `uv --link-mode symlink`.

    The folders of the packages, or those that they were installed to, or one folder that holds many of these.
    """
    packages = [p for path in paths if path.endswith(_PACKAGES) for p in _linked(path, depth=0)]
    places = list(dict.fromkeys(_installation(package) for package in packages))
    counts = Counter(map(os.path.dirname, places))
    return tuple(dict.fromkeys(above if counts[above := os.path.dirname(p)] > _MANY else p for p in places))


def _installation(package: str) -> str:
    """The folder that a package was installed to, as its metadata there show; otherwise its own."""
    folder = package
    for _ in range(_NESTED):
        folder = os.path.dirname(folder)
        if any(name.endswith(".dist-info") for name in os.listdir(folder)):
            return folder
    return package


def _linked(folder: str, *, depth: int) -> Iterator[str]:
    """One file of a package stands for all; a folder without files may hold packages of several origins."""
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError:  # it is a file, or is missing
        return
    files = [e for e in entries if not e.is_dir()]
    for entry in entries if depth == 0 else files[:1]:
        if entry.is_symlink():
            place = os.path.realpath(entry.path)
            yield place if depth == 0 else os.path.dirname(place)
    if depth == 0 or not files and depth < _NESTED:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(("__", ".")):
                yield from _linked(entry.path, depth=depth + 1)


def _attributes(folder: str, add: int, remove: int) -> None:
    """Adds or removes attributes of a mount, and adds them to all below it."""
    attributes = (ctypes.c_uint64 * 4)(add, remove, 0, 0)
    arguments = (_AT_FDCWD, folder.encode(), _AT_RECURSIVE if add else 0, attributes, ctypes.sizeof(attributes))
    if _libc().syscall(_MOUNT_SETATTR, *arguments) != 0:
        raise Refused(f"mount_setattr: {os.strerror(ctypes.get_errno())}")


def _drop_rights() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if _libc().prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or _libc().capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise Refused(f"capset: {os.strerror(ctypes.get_errno())}")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _libc().prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _unshare(flags: int) -> None:
    if _libc().unshare(flags) != 0:
        raise Refused(f"unshare: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    done = _libc().mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), data.encode())
    if done != 0:
        raise Refused(f"mount {target}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def close_all_but(kept: Sequence[int]) -> None:
    """Closes every file descriptor but these."""
    edges = [-1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for low, high in zip(edges, edges[1:], strict=False):
        if low + 1 < high:  # for an empty range, CPython 3.11 closes every descriptor
            os.closerange(low + 1, high)
