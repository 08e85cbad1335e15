"""Kernels that do not end, for tests of the command: from some call on, in Python or where no Python code runs."""

import itertools
import time

import torch

from goldsmith import assay

INPUTS = {"x": torch.arange(40.0).view(5, 8)}
calls = [0]


def target(kernel):
    return assay.Target(kernel, lambda x: x * 2, cases=INPUTS, name=kernel.__name__, backward=None)


def sleeps(x):
    time.sleep(1000)


def wrong_then_loops(x):
    calls[0] += 1
    while calls[0] > 2:
        pass
    return x * 3


def wrong_then_deaf(x):
    """It looks at no signal."""
    calls[0] += 1
    if calls[0] > 2:
        sum(itertools.repeat(0))
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
            sum(itertools.repeat(0))
        return dy * 2


backward = assay.Target(Stuck.apply, lambda x: x * 2, cases=INPUTS, name="stuck")
first, loop, deaf = target(sleeps), target(wrong_then_loops), target(wrong_then_deaf)
