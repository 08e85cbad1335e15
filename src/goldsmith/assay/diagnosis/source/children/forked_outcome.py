"""The outcome of an edit that runs in a fork of this process, whose memory stays as it is whatever the edit writes."""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import Any

from .....core.json_values import parse_json

SLOW, CRASHED = "slow", "crashed"
_LATE = 0.5  # seconds more until the process is ended, since an alarm interrupts no C code


def forked(outcome: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What `outcome` returns, which ends by itself after `seconds` unless it runs C code."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            limit = math.ceil(seconds) + 2  # if the process above ends first
            resource.setrlimit(resource.RLIMIT_CPU, (limit + int(sum(os.times()[:2])), resource.RLIM_INFINITY))
            os.write(writing, json.dumps(outcome()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        ended = bool(select.select([pipe], [], [], seconds + _LATE)[0])
        if not ended:
            os.kill(pid, signal.SIGKILL)
        answer = pipe.read()
    os.waitpid(pid, 0)
    if answer:
        return dict(parse_json(answer.decode()))
    state = CRASHED if ended else SLOW
    nothing = {"problem": 0, "seconds": seconds, "moved": True, "changed": []}
    return {"state": state, "wrong": [], "share": 1.0, "stages": [], **nothing}
