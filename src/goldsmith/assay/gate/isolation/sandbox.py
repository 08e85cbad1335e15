"""Namespaces of a candidate's process, where the system lets an ordinary user make them.

Inside: no network; no process but its own, all of which end with the first; the file system is read-only, but for an
empty temporary folder; named folders look empty. Afterwards the process drops the rights that the namespaces gave it,
so that it cannot undo any of this. A kernel exploit can; this module does not claim otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD, _ATTR_RDONLY = 442, 0x8000, -100, 1
_CAPABILITY_VERSION = 0x20080522
FULL, GROUP = "namespaces", "process group"  # how much isolation there is


@dataclass(frozen=True)
class Sandbox:
    """home: the only folder that can be written, empty at first; hidden: folders that look empty."""

    home: str
    hidden: tuple[str, ...] = ()
    full: bool = True


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
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = FULL
        try:
            enter(Sandbox("/tmp"))
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
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    for folder in sandbox.hidden:
        if Path(folder).is_dir():
            _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV | _RDONLY)
    _read_only("/")
    _mount("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV)
    if not any(Path(p).resolve().is_relative_to("/tmp") for p in (sys.prefix, *sys.path) if p):
        _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV)
        Path(sandbox.home).mkdir(parents=True, exist_ok=True)
    else:
        _mount("tmpfs", sandbox.home, "tmpfs", _NOSUID | _NODEV)


def _read_only(folder: str) -> None:
    """Makes every mount below read-only."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    arguments = (_AT_FDCWD, folder.encode(), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
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


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    done = _libc().mount(source.encode(), target.encode(), None if kind is None else kind.encode(), flags, None)
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
