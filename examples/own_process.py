"""Calls a function in a process of its own, and says how much memory it took there, whatever ran before.

    result, most_bytes = in_own_process(function, *args, stop=EVENT, before=REHEARSAL)

The process is forked from one that has done nothing but import the program, so it has neither the caller's memory nor
its threads. It calls before(*args), which should load what the function loads when it first runs (a hundred megabytes
of torch), and then function(*args, stop). The figure is the most that was resident less what was resident in between.
Ctrl-C is the caller's to answer: it sets `stop`.
"""

import multiprocessing
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["__main__"])
STATUS = Path("/proc/self/status")


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: now, and at most so far (which is all that systems without /proc tell)."""
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return most, most


def in_own_process(function: Callable[..., Any], *args: Any, stop: Any, before: Callable[..., Any]) -> tuple[Any, int]:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_call, args=(theirs, pickle.dumps((function, before, args)), stop), daemon=True)
    child.start()
    theirs.close()
    try:
        sent = ours.recv_bytes()
    except EOFError:
        child.join()
        raise SystemExit(
            f"a process ended without a result: exit status {child.exitcode} (-9: out of memory)"
        ) from None
    child.join()
    return pickle.loads(sent)


def _call(connection: Any, given: bytes, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    function, before, args = pickle.loads(given)
    before(*args)
    start, _ = resident()
    result = function(*args, stop)
    _, most = resident()
    connection.send_bytes(pickle.dumps((result, most - start)))
