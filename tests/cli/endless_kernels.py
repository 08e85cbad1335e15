"""Kernels that do not end, for tests of the command: from some call on, in Python or where no Python code runs."""

import ctypes
import time

import torch

from goldsmith import assay

INPUTS = {"x": torch.arange(40.0).view(5, 8)}
calls = [0]
# In it no signal is looked at, as in a loop in C that never asks Python; it takes no time of the processor.
MUTEX, locked = ctypes.create_string_buffer(64), ctypes.pythonapi.pthread_mutex_lock
locked(MUTEX)  # zeros were a mutex that nobody has; who asks again waits for ever


def target(kernel):
    return assay.Target(kernel, lambda x: x * 2, cases=INPUTS, name=kernel.__name__, backward=None)


def sleeps(x):
    time.sleep(1000)


def wrong_then_loops(x):
    calls[0] += 1
    while calls[0] > 2:
        time.sleep(0.01)
    return x * 3


def wrong_then_deaf(x):
    """It looks at no signal."""
    calls[0] += 1
    if calls[0] > 2:
        locked(MUTEX)
    return x * 3


class Stuck(torch.autograd.Function):
    """Its backward waits until its call is the last, and so for ever where another came in between."""

    @staticmethod
    def forward(ctx, x):
        calls[0] += 1
        ctx.call = calls[0]
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        if ctx.call != calls[0]:
            locked(MUTEX)
        return dy * 2


backward = assay.Target(Stuck.apply, lambda x: x * 2, cases=INPUTS, name="stuck")
first, loop, deaf = target(sleeps), target(wrong_then_loops), target(wrong_then_deaf)
