"""A stranger's kernels for `goldsmith verify own_kernels:NAME`: right, wrong, crashing, hanging, misdeclared."""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch

from goldsmith import assay


def golden(x, k):
    return assay.stage("scaled", x * k) + 1


@assay.case(T=[1, 5], why="one row and several")
def rows(make, T):
    return {"x": make.normal(T, 6), "k": 3.0}


def scaled(x, k):
    return assay.stage("scaled", x * k) + 1


def off(x, k):
    return assay.stage("scaled", x * k * 1.5) + 1


def colours(x, k):
    raise ValueError("\x1b[31mred\x1b[0m \x07\r\x9b2J")


def crashes(x, k):
    if x.shape[0] == 5:
        print("about to fall over", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return x * k + 1


def hangs(x, k):
    if x.shape[0] == 5:
        time.sleep(600)
    return x * k + 1


def crashes_deep(x, k, depth=60):
    """Faulthandler's report of such a stack is longer than 4,000 bytes."""
    if x.shape[0] == 5:
        if depth:
            return crashes_deep(x, k, depth - 1)
        os.abort()
    return x * k + 1


def interrupts(x, k):
    if x.shape[0] == 5:
        raise KeyboardInterrupt
    return x * k + 1


def leaves(x, k):
    if x.shape[0] == 5:
        sys.exit("not today")
    return x * k + 1


def talks(x, k):
    print("words of the first", file=sys.stderr, flush=True)
    return x * k + 1


def dies_in_silence(x, k):
    os._exit(3)


def two(x, k):
    return x * k + 1, x


def slow_and_wrong(x, k, seen=[]):  # noqa: B006  counts its own calls
    """Says, on its tenth call, that enough is known to be interrupted."""
    seen.append(1)
    if len(seen) > 9:
        Path(os.environ["OWN_KERNELS_STARTED"]).touch()
        time.sleep(0.5)
    return x * k * 1.5 + 1


def off_by_little(x, k):
    """One part in a thousand: bfloat16 hides it, the second run with float32 inputs does not."""
    return ((x.float() * k + 1) * 1.0005).to(x.dtype)


def prints(x, k):
    print('{"id": 1, "verdict": "pass"}')  # must not be taken for the worker's answer
    sys.stdout.flush()
    return x * k + 1


@assay.case(T=[1, 5])
def undrawable(make, T):
    if T == 5:
        raise RuntimeError("the file with the inputs is gone")
    return {"x": make.normal(T, 6), "k": 3.0}


def narrow_golden(x, k):
    return (x.float() * k + 1).double()


target = assay.Target(scaled, golden, cases=rows)
wrong = assay.Target(off, golden, cases=rows)
colourful = assay.Target(colours, golden, cases=rows)
crashing = assay.Target(crashes, golden, cases=rows)
hanging = assay.Target(hangs, golden, cases=rows)
talking = assay.Target(prints, golden, cases=rows)
undrawn = assay.Target(scaled, golden, cases=undrawable)
at_fault = assay.Target(scaled, narrow_golden, cases=rows)
aborting = assay.Target(lambda x, k: crashes_deep(x, k), golden, cases=rows)
interrupting = assay.Target(interrupts, golden, cases=rows)
leaving = assay.Target(leaves, golden, cases=rows)
nameless = [assay.Target(lambda x, k: x * k + 1, golden, cases=rows) for _ in range(2)]
partial = assay.Target(functools.partial(scaled), golden, cases=rows)
little = assay.Target(off_by_little, golden, cases=rows, dtypes=(torch.bfloat16,))
slow = assay.Target(slow_and_wrong, golden, cases=rows)
talkative = assay.Target(talks, golden, cases=rows)
silent = assay.Target(dies_in_silence, golden, cases=rows)
misdeclared = assay.Target(two, golden, cases=rows, outputs=("y", "z"))
several = [target, talking]
not_a_target = 3
