"""A stranger's kernels for `goldsmith verify own_kernels:NAME`: right, wrong, crashing, hanging, misdeclared."""

import os
import signal
import sys
import time

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


def crashes(x, k):
    if x.shape[0] == 5:
        print("about to fall over", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return x * k + 1


def hangs(x, k):
    if x.shape[0] == 5:
        time.sleep(600)
    return x * k + 1


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
crashing = assay.Target(crashes, golden, cases=rows)
hanging = assay.Target(hangs, golden, cases=rows)
talking = assay.Target(prints, golden, cases=rows)
undrawn = assay.Target(scaled, golden, cases=undrawable)
at_fault = assay.Target(scaled, narrow_golden, cases=rows)
several = [target, talking]
not_a_target = 3
