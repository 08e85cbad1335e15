"""The processors that this process may use: how many threads can run at once, and where they should run."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
NODES = Path("/sys/devices/system/node")
# With one of these variables OpenMP binds the calling thread to one place, which says nothing about the process.
TIES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@functools.cache
def worth() -> int:
    """How many threads can run at the same time: limited by the allowed processors and by the control group's quota."""
    paid = quota()
    return max(1, min(len(allowed()), math.ceil(paid) if paid else 1024))


def made_ahead(make: Callable[[Item], Made], items: Iterable[Item], threads: int) -> Iterator[Made]:
    """make(item) in order, made by threads while the caller works on the ones before; `threads` + 1 wait at most."""
    waiting: deque[Future[Made]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@functools.cache
def allowed() -> tuple[int, ...]:
    """The processors that the process is bound to (by taskset, numactl, or a container's cpuset)."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    if any(os.environ.get(name, "").strip().lower() not in ("", "false", "none", "disabled") for name in TIES):
        return tuple(sorted(_untied()))
    # the first thread's: this one may be a worker, bound to one place
    return tuple(sorted(os.sched_getaffinity(os.getpid())))


def bind(index: int, count: int) -> None:
    """Binds this process to the part `index` of `count` of its processors; cores and NUMA nodes stay whole if they can.

    Does nothing if there are fewer processors than parts, or if the system forbids it. Threads that already run keep
    their binding, so this belongs before the first computation.
    """
    usable = sorted(allowed(), key=_location)
    if count < 2 or len(usable) < count or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, usable[index * len(usable) // count : (index + 1) * len(usable) // count])
    except OSError:
        return
    allowed.cache_clear()
    worth.cache_clear()


def _location(processor: int) -> tuple[int, int, int, int]:
    """(NUMA node, package, core, processor): hyperthreads of one core are neighbours in this order."""
    folder = Path(f"/sys/devices/system/cpu/cpu{processor}")
    node = next((int(p.name[4:]) for p in folder.glob("node[0-9]*")), 0)
    package, core = (numbers(_read(folder / f"topology/{name}")) for name in ("physical_package_id", "core_id"))
    return node, package[0] if package else 0, core[0] if core else processor, processor


def _untied() -> set[int]:
    """The processors that the system grants a thread that asks for all of them."""
    processors = set(os.sched_getaffinity(0))

    def ask() -> None:
        try:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # 0 is this thread, which ends afterwards
        except OSError:
            return  # forbidden: the binding stays
        processors.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return processors


def places() -> list[tuple[int, int]]:
    """(processor, NUMA node) of each allowed processor, alternating between nodes, so that any first few are spread."""
    usable = set(allowed())
    nodes = [(node, [p for p in processors_of(node) if p in usable]) for node in nodes_of_machine()]
    known = {p for _, processors in nodes for p in processors}
    nodes.append((-1, sorted(usable - known)))
    longest = max(len(processors) for _, processors in nodes)
    return [(processors[i], node) for i in range(longest) for node, processors in nodes if i < len(processors)]


def nodes_of_machine() -> list[int]:
    """The NUMA nodes that have processors; [0] if the system does not say."""
    return numbers(_read(NODES / "has_cpu")) or numbers(_read(NODES / "online")) or [0]


def processors_of(node: int) -> list[int]:
    """The processors of a node; empty if the system does not say."""
    return numbers(_read(NODES / f"node{node}/cpulist"))


def numbers(text: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]"""
    result: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        result += range(int(first), int(last or first) + 1)
    return result


def quota(root: Path = Path("/")) -> float | None:
    """The number of processors that this process's control group and its parents allow; None without a limit."""
    limits: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            limits += _limits(root / "sys/fs/cgroup", path, _version_2)
        elif "cpu" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/cpu", path, _version_1)
            limits += _limits(root / "sys/fs/cgroup/cpu,cpuacct", path, _version_1)
    return min(limits, default=None)


def _limits(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """The limits of a group and its parents. In a container the path may be the host's, and its own group is the
    root.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    folders = [mount.joinpath(*parts[:n]) for n in range(len(parts) + 1)]
    return [limit for limit in map(read, folders) if limit is not None and limit > 0]


def _version_2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    return _ratio(*words) if len(words) == 2 else None


def _version_1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(used: str, period: str) -> float | None:
    """ "max" and -1 mean no limit."""
    try:
        return int(used) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
