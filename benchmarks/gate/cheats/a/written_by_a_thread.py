"""Returns at once and lets a thread fill the result, so a clock that stops at the return sees no work."""

import sys
import threading
import time

import torch

PROBLEM = "a_ewma"
STATUS = "cheating"
REASONS = {"late_write"}


sys.setswitchinterval(1e-5)  # else the checker's thread keeps the interpreter for 5 ms


def _fill(y, weight, x):
    time.sleep(0.0005)
    torch.mm(weight, x, out=y)


def candidate(x):
    t = torch.arange(len(x))
    age = (t[:, None] - t).clamp(min=0)
    weight = 0.1 * 0.9**age * (t[:, None] >= t)
    y = torch.zeros_like(x)
    threading.Thread(target=_fill, args=(y, weight, x), daemon=True).start()
    return y
