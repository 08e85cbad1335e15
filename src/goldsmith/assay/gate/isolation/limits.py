"""Limits of a candidate's process: time, memory, files, processes, output."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

_MOST = 1 << 60  # what the system's limits can hold
_WRITTEN = 1 << 30  # bytes of one file
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Limits:
    """What a candidate may use.

    seconds         for one call, forward and backward, with the interpreter's and the compiler's work
    import_seconds  for its import
    total_seconds   for all its imports and calls together, where its judge trusts it not
    memory_bytes    beyond what its process has at the start, all its processes together
    files           open files
    processes       beyond those that the user has at the start
    output_bytes    that it may print
    """

    seconds: float = 60.0
    import_seconds: float = 60.0
    memory_bytes: int = 4 << 30
    files: int = 256
    processes: int = 64
    output_bytes: int = 1 << 20
    total_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value!r}")
            if "seconds" not in name and (not isinstance(value, int) or value > _MOST):
                raise ValueError(f"{name}: expected a whole number of at most {_MOST}, got {value!r}")

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def of_a_process(self) -> dict[str, object]:
        """Those that its own process has to know, and not those that its judge keeps."""
        return {name: getattr(self, name) for name in ("memory_bytes", "files", "processes")}


@dataclass
class Spent:
    """Seconds for which a judge has waited for the processes of one candidate."""

    seconds: float = 0.0


def apply(limits: Limits, *, address_space: bool, boxed: bool) -> None:
    """Limits this process. address_space: also its address space, which CUDA reserves far beyond what it uses."""
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_NOFILE, limits.files)
    if boxed:
        _set(resource.RLIMIT_FSIZE, _WRITTEN)
    with contextlib.suppress(OSError):  # no /proc
        _set(resource.RLIMIT_NPROC, _threads_of_user() + limits.processes)
    if address_space:
        with contextlib.suppress(OSError):
            _set(resource.RLIMIT_AS, _statm("self")[0] + limits.memory_bytes)


def resident_bytes(pid: int, inherited: int = 0) -> int:
    """Memory of a process and its descendants, without what each of them inherited; 0 where /proc is missing."""
    total = 0
    for each in _with_descendants(pid):
        with contextlib.suppress(OSError):
            total += max(0, _statm(str(each))[1] - inherited)
    return total


def stored_bytes(pid: int) -> int:
    """Memory in the temporary folders of a process with a root of its own, and in unnamed files that are open there."""
    total = 0
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{pid}/root").st_dev != os.stat("/").st_dev:  # before, it has the root of its judge
            folders = os.statvfs(f"/proc/{pid}/root/tmp")
            total = (folders.f_blocks - folders.f_bfree) * folders.f_frsize
    for each in _with_descendants(pid):
        with contextlib.suppress(OSError):
            paths = [f"/proc/{each}/fd/{name}" for name in os.listdir(f"/proc/{each}/fd")]
            total += sum(os.stat(p).st_blocks * 512 for p in paths if os.readlink(p).startswith("/memfd:"))
    return total


def children(pid: int) -> list[int]:
    """The processes that a process has forked; [] where it has ended or /proc is missing."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(p) for p in file.read().split()]
    except OSError:
        return []


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its descendants so far; 0 where /proc is missing."""
    total = 0.0
    for each in _with_descendants(pid):
        with contextlib.suppress(OSError), open(f"/proc/{each}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
            total += sum(map(int, fields[13:15])) / _TICKS  # of children that have ended
            total += time.clock_gettime(~each << 3 | 2)  # the process's own clock, as clock_getcpuclockid names it
    return total


def _with_descendants(pid: int) -> Iterator[int]:
    pending = [pid]
    while pending:
        each = pending.pop()
        yield each
        pending += children(each)


def _statm(pid: str) -> tuple[int, int]:
    """Bytes of address space and of resident memory."""
    with open(f"/proc/{pid}/statm") as statm:
        fields = statm.read().split()
    return int(fields[0]) * _PAGE, int(fields[1]) * _PAGE


def _threads_of_user() -> int:
    """Number of threads of this user, which is what the system compares with the limit on processes."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _set(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    new = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (new, new))
