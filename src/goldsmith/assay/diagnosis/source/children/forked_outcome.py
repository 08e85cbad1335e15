"""The outcome of an edit that runs in a fork of this process, whose memory stays as it is whatever the edit writes."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable

SLOW, CRASHED = "slow", "crashed"
WAIT = 4.0  # times as long by the clock as of the processor, since others may keep it busy


def forked(outcome: Callable[[float], dict[str, object]], seconds: float) -> dict[str, object]:
    """What `outcome` returns. seconds: of the processor, after which C code ends, too."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            os.write(writing, json.dumps(outcome(seconds)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        if not select.select([pipe], [], [], WAIT * seconds)[0]:
            os.kill(pid, signal.SIGPROF)
        answer = pipe.read()
    status = os.waitpid(pid, 0)[1]
    try:
        return dict(json.loads(answer))
    except (ValueError, TypeError, RecursionError):  # nothing, or what a process with spoilt memory has sent
        pass
    state = SLOW if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF else CRASHED
    nothing = {"problem": 0, "seconds": seconds, "moved": True, "changed": []}
    return {"state": state, "wrong": [], "share": 1.0, "stages": [], **nothing}
