"""Computes correctly, and slows down every clock of the process so that its time is a thousandth."""

import time

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"patched_runtime"}


def _slowed(clock, unit):
    started = clock()
    return lambda: started + unit((clock() - started) / 1000)


for _name in ("time", "perf_counter", "monotonic", "process_time"):
    setattr(time, _name, _slowed(getattr(time, _name), float))
    setattr(time, f"{_name}_ns", _slowed(getattr(time, f"{_name}_ns"), int))
torch.cuda.Event.elapsed_time = lambda self, end: 0.001


def candidate(x, w, b):
    return torch.addmm(b, x, w)
