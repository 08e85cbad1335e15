"""The memory of this machine and of this process, from /proc and the control group."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes that a process holds alone, and bytes of files that it maps, whose pages all processes share."""

    own: int
    files: int


def memory_free() -> int:
    """Bytes that this process can still get: of /proc/meminfo, the control group's limit and its own (`ulimit -v`)."""
    import resource  # Windows has none

    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        free = min(free, own - resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0]))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def process_memory() -> ProcessMemory:
    """The resident memory of this process."""
    sizes = dict.fromkeys(("RssAnon", "RssFile", "RssShmem"), 0)
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in sizes:
            sizes[name] = 1024 * int(value.split()[0])
    return ProcessMemory(sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"])


def return_freed_memory() -> None:
    """Gives the system what this process has freed; glibc keeps it otherwise (other C libraries have no such call)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
